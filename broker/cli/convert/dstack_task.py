"""dstack's task configuration as a spec (dstack.ai, `.dstack.yml` reference of tasks, read in November 2026)."""

import re
from pathlib import Path
from typing import Any

from broker.cli.convert.conversion import MACHINES_END, Conversion

SPOT = {"spot": "only", "on-demand": "never", "auto": "allowed"}
CAUSES = {"no-capacity": ["no_capacity"], "interruption": ["preempted", "lost"], "error": ["infrastructure"]}
SIZES = {"cpus": ("cpu", "count"), "memory_gb": ("memory", "size"), "disk_gb": ("disk", "size")}
"""dstack's name of each least size of a machine, and the key of the size in its long form."""
PROGRAM_ERRORS = "an error of the program itself is not repeated, only one of a machine"
SECRET = re.compile(r"\$\{\{\s*secrets\.(\w+)\s*\}\}")


def convert_dstack(conversion: Conversion) -> None:
    """Convert the document. Raises BadInput for other types than tasks."""
    task = dict(conversion.document.data)
    if (kind := task.pop("type", None)) != "task":
        raise conversion.refuse("type", f"{kind} has no counterpart; only a task ends")
    commands = task.pop("commands", None)
    if not commands:
        raise conversion.refuse("commands", "is missing; a job is a program that ends")
    stem = re.sub(r"(\.dstack)?\.ya?ml$", "", Path(conversion.document.name).name).strip(".")
    conversion.name(task.pop("name", None), stem or "job")
    _code(conversion, task.pop("repos", None))
    lines = [str(line) for line in ([commands] if isinstance(commands, str) else commands)]
    conversion.command("\n".join(["set -e", *lines]) if len(lines) > 1 else lines[0])
    if "DSTACK_" in "\n".join(lines):
        conversion.lose("commands", why="uses variables DSTACK_…, which are not set")
    if (image := task.pop("image", None)) is not None:
        conversion.image(str(image), "image")
    _environment(conversion, task.pop("env", None))
    _limits(conversion, task)
    _resources(conversion, task.pop("resources", None) or {})
    _retry(conversion, task.pop("retry", None))
    _utilisation(conversion, task.pop("utilization_policy", None))
    conversion.lose_rest(task)
    conversion.closing_hints()


def _code(conversion: Conversion, repos: Any) -> None:
    """Set the code folder: the first local repository, otherwise the folder of the spec."""
    code = "."
    for number, repo in enumerate(repos or []):
        local = repo.get("local_path") if isinstance(repo, dict) else str(repo).partition(":")[0]
        if number == 0 and local and not re.match(r"git@|https?$|ssh$", local):
            code = local
            rest = repo if isinstance(repo, dict) else {"path": str(repo).partition(":")[2] or None}
            conversion.lose_rest({k: v for k, v in rest.items() if k != "local_path"}, "repos", "0")
        else:
            conversion.lose("repos", str(number), why="has no counterpart; check it out into the code folder")
    conversion.group("script")["code"] = code


def _environment(conversion: Conversion, env: Any) -> None:
    """Convert `NAME=VALUE` items or a mapping. A name alone, and a reference to a secret, become secrets."""
    pairs = env.items() if isinstance(env, dict) else [_pair(str(item)) for item in env or []]
    for name, value in pairs:
        reference = SECRET.fullmatch(value) if isinstance(value, str) else None
        if value is None or (reference and reference[1] == name):
            conversion.secrets([name], "env")
        elif isinstance(value, str) and "${{" in value:
            conversion.lose("env", name, why="a reference within a value has no counterpart")
        else:
            conversion.environment({name: value}, "env")


def _pair(item: str) -> tuple[str, str | None]:
    name, equals, value = item.partition("=")
    return name, value if equals else None


def _limits(conversion: Conversion, task: dict[str, Any]) -> None:
    """Convert clouds, regions, prices and times."""
    resources = conversion.group("resources")
    conversion.providers(task.pop("backends", None) or [], "backends")
    for region in task.pop("regions", None) or []:
        conversion.add("regions", str(region))
    policy = str(task.pop("spot_policy", None) or "on-demand")
    if policy not in SPOT:
        conversion.lose("spot_policy", why=f"{policy} is none of {', '.join(SPOT)}; on-demand is used")
    resources["spot"] = SPOT.get(policy, "never")
    if (nodes := task.pop("nodes", None)) not in (None, 1):
        resources["nodes"] = nodes
    if (price := task.pop("max_price", None)) is not None:
        conversion.hourly_limit(price, "max_price")
    if (duration := task.pop("max_duration", None)) not in (None, "off", False, True):
        conversion.spec["max_duration"] = duration
    if priority := task.pop("priority", None):
        conversion.spec["priority"] = priority
    for name, value in dict(task.pop("tags", None) or {}).items():
        conversion.spec.setdefault("labels", {})[name] = str(value)
    for needless in ("creation_policy", "idle_duration"):
        if task.pop(needless, None) is not None:
            conversion.hint(needless, text=MACHINES_END)
    if (stop := task.pop("stop_duration", None)) is not None:  # `off`, which YAML reads as false, is a value
        conversion.lose("stop_duration", why=f"{'off' if stop is False else stop} has no counterpart")


def _resources(conversion: Conversion, resources: dict[str, Any]) -> None:
    rest = dict(resources)
    gpu = rest.pop("gpu", None)
    parts = dict(gpu) if isinstance(gpu, dict) else _gpu(str(gpu)) if gpu is not None else {}
    names = parts.pop("name", None) or []
    for name in [names] if isinstance(names, str) else names:
        conversion.add("accelerators", str(name))
    count = parts.pop("count", None)
    if gpu is not None:
        conversion.group("resources")["gpus"] = _min_gpus(conversion, 1 if count is None else count)
    if str(parts.get("vendor", "")).lower() == "nvidia":
        del parts["vendor"]
    if (memory := parts.pop("memory", None)) is not None:
        why = f"{memory} has no counterpart; name GPUs with that memory in resources.accelerators"
        conversion.lose("resources", "gpu", "memory", why=why)
    conversion.lose_rest(parts, "resources", "gpu")
    for setting, (key, inner) in SIZES.items():
        if (size := rest.pop(key, None)) is not None:
            conversion.least(setting, _size(conversion, size, key, inner), "resources", key)
    conversion.lose_rest(rest, "resources")


def _size(conversion: Conversion, size: Any, key: str, inner: str) -> Any:
    """Return a size as `8..`, from `{count: 8..}`, `{min: 8}` or `x86:8..`. A maximum or another processor is lost."""
    parts = dict(size) if isinstance(size, dict) else {}
    arch = parts.get("arch") or ("" if isinstance(size, dict) else str(size).rpartition(":")[0])
    if str(arch).lower() not in ("", "x86"):
        conversion.lose("resources", key, why=f"processor {arch} has no counterpart; the broker's images are for x86")
    if inner in parts:
        conversion.lose_rest({k: v for k, v in parts.items() if k not in (inner, "arch")}, "resources", key)
        size = parts[inner]
    minimum, dots, maximum = str(size).rpartition(":")[2].partition("..")
    if isinstance(size, dict):
        minimum, maximum = size.get("min", ""), size.get("max", "")
    if maximum and minimum:
        conversion.lose("resources", key, why=f"the maximum {maximum} is lost; {minimum} is the least")
    return minimum if minimum or isinstance(size, dict) else dots + maximum


def _min_gpus(conversion: Conversion, count: Any) -> int:
    """Return the least number of GPUs of a count: a number, `2..4`, or `{min: 2, max: 4}`."""
    if isinstance(count, dict):
        minimum, maximum = (str("" if count.get(end) is None else count[end]) for end in ("min", "max"))
    else:
        minimum, dots, maximum = str(count).replace(" ", "").partition("..")
        maximum = maximum if dots else minimum
    number = int(minimum) if minimum.isdecimal() else 1
    if str(number) != maximum:
        conversion.lose(
            *("resources", "gpu", "count"), why=f"{count} is a range, and the broker needs a number; {number} is used"
        )
    return number


def _gpu(text: str) -> dict[str, Any]:
    """Return the parts of a short form such as `nvidia:A100,H100:80GB:2..4`, in any order."""
    parts: dict[str, Any] = {}
    for token in text.replace(" ", "").split(":"):
        if token.lower() in ("nvidia", "amd", "google", "tpu", "intel", "tenstorrent"):
            parts["vendor"] = token
        elif token[:1].isalpha():
            parts["name"] = token.split(",")
        elif any(character.isalpha() for character in token):
            parts["memory"] = token
        else:
            parts["count"] = token
    return parts


def _retry(conversion: Conversion, retry: Any) -> None:
    if retry is False:
        conversion.spec["retry"] = {"max": 0}
    if retry is True:
        conversion.lose("retry", why=PROGRAM_ERRORS)
    if not isinstance(retry, dict):
        return
    events = retry.get("on_events")
    if events is not None:  # absent means all events, as retry.on does
        conversion.spec["retry"] = {"on": [cause for event in events for cause in CAUSES.get(str(event), [])]}
    events = CAUSES if events is None else events
    for event in events:
        if str(event) not in CAUSES:
            conversion.lose("retry", "on_events", why=f"{event} is none of {', '.join(CAUSES)}")
    if "error" in events:
        conversion.lose("retry", "on_events", why=PROGRAM_ERRORS)
    conversion.lose_rest({key: value for key, value in retry.items() if key != "on_events"}, "retry")


def _utilisation(conversion: Conversion, policy: Any) -> None:
    """Convert the end of a run whose GPUs are idle."""
    if isinstance(policy, dict):
        conversion.spec["idle"] = {
            "action": "end",
            "gpu_below": int(policy.get("min_gpu_utilization", 0)) / 100,
            "window_s": policy.get("time_window", 900),
        }
        known = {"min_gpu_utilization", "time_window"}
        conversion.lose_rest({k: v for k, v in policy.items() if k not in known}, "utilization_policy")
