#!/bin/bash
# Runs inside the new root file system, as its root: users, SkyPilot's runtime for both of them, the trainer.
# WHEEL: hash of SkyPilot's wheel in /bake/wheels. uv's indexes come by the environment.
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

home=/home/ubuntu
install -d -o ubuntu -g ubuntu $home/.local $home/.local/bin $home/.sky $home/.sky/wheels $home/.sky/sky_app $home/sky_workdir
cp /bake/uv $home/.local/bin/uv
uv=$home/.local/bin/uv

# As sky/skylet/constants.py installs it, but for all clouds at once and with the system's Python.
runtime=$home/skypilot-runtime
$uv venv --quiet --seed --python /usr/bin/python3 $runtime
$uv pip install --quiet --python $runtime/bin/python 'setuptools<70' 'click<8.3.0' 'ray[default]==2.9.3' \
    'pydantic-core==2.41.1' "$(echo /bake/wheels/"$WHEEL"/skypilot-*.whl)[lambda,runpod,vast,aws,remote]"
cp -r "/bake/wheels/$WHEEL" $home/.sky/wheels/
echo "$WHEEL" > $home/.sky/wheels/current_sky_wheel_hash
$uv venv --quiet --seed --relocatable --system-site-packages --python /usr/bin/python3 $home/sky-user-env
$runtime/bin/python -m compileall -q $runtime/lib > /dev/null || true # ray ships templates that are no Python
chown -R ubuntu:ubuntu $home

# The same for root by hard links; what names the folder gets a copy of its own.
cp -al $runtime $home/sky-user-env $home/.local $home/.sky $home/sky_workdir /root/
grep -rlI --exclude-dir=lib $runtime /root/skypilot-runtime | while read -r file; do
    cp --preserve=mode "$file" "$file.own"
    sed -i "s|$home/|/root/|g" "$file.own"
    mv "$file.own" "$file"
done
rm -r /root/.sky && cp -r $home/.sky /root/.sky
chown root:root /root /root/.sky /root/.local /root/sky_workdir

# deploy/trainer_install.sh, with uv; the trainer's own package comes from the checkout at boot.
$uv venv --quiet --seed --python /usr/bin/python3 /srv/venv
$uv pip install --quiet --python /srv/venv/bin/python -c /bake/constraints-trainer.txt -r /bake/requirements.txt
/srv/venv/bin/python -m compileall -q /srv/venv/lib > /dev/null || true

rm -rf /var/cache/apt/* /var/lib/apt/lists/* /usr/share/doc/* /usr/share/man/* /usr/share/locale/*
find / -xdev -type d \( -name tests -o -name test \) -path '*/site-packages/*' -prune -exec rm -rf {} +
