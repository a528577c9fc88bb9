#!/bin/bash
# Runs inside the new root file system, as its root: the users, and what the trainer imports.
# Only the bake uses uv, which takes its indexes from the environment.
set -euo pipefail

useradd --create-home --shell /bin/bash --uid 1000 ubuntu
usermod --password '*' ubuntu # not locked: sshd refuses locked accounts even with a key
usermod --password '*' root
groupadd --system docker
usermod --append --groups docker ubuntu
echo 'ubuntu ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/ubuntu
chmod 440 /etc/sudoers.d/ubuntu

cat > /etc/ssh/sshd_config.d/emulated.conf <<'CONF'
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 100
UseDNS no
CONF
ssh-keygen -A > /dev/null

# deploy/trainer_install.sh, with uv; the trainer's own package comes from the checkout at boot.
/bake/uv venv --quiet --seed --python /usr/bin/python3 /srv/venv
/bake/uv pip install --quiet --python /srv/venv/bin/python -c /bake/constraints-trainer.txt -r /bake/requirements.txt
/srv/venv/bin/python -m compileall -q /srv/venv/lib > /dev/null || true

rm -rf /var/cache/apt/* /var/lib/apt/lists/* /usr/share/doc/* /usr/share/man/* /usr/share/locale/*
find / -xdev -type d \( -name tests -o -name test \) -path '*/site-packages/*' -prune -exec rm -rf {} +
