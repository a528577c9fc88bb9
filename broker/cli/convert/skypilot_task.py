"""SkyPilot's task YAML as a spec (docs.skypilot.co, "SkyPilot YAML", read in November 2026)."""

from pathlib import Path
from typing import Any

from broker.cli.convert.conversion import MACHINES_END, Conversion

PLACE = frozenset({"cloud", "region", "infra"})
NEEDLESS = ("autostop", "cloud", "region", "infra", "accelerators", "any_of", "ordered", "use_spot")
"""Settings of `resources` that are read; a job's machines are destroyed at its end without `autostop`."""
SIZES = {"cpus": "cpus", "memory_gb": "memory", "disk_gb": "disk_size"}
"""SkyPilot's name of each least size of a machine."""


def convert_skypilot(conversion: Conversion) -> None:
    """Convert the document. Raises BadInput if it runs nothing."""
    task = dict(conversion.document.data)
    conversion.name(task.pop("name", None), Path(conversion.document.name).stem)
    run = task.pop("run", None)
    if not isinstance(run, str) or not run.strip():
        raise conversion.refuse("run", "is missing; a job is a program that ends")
    _code(conversion, task.pop("workdir", None))
    conversion.command(run)
    conversion.setup(str(task.pop("setup", None) or ""))
    if "SKYPILOT_" in run:
        conversion.lose("run", why="uses variables SKYPILOT_…, which are not set")
    if (nodes := task.pop("num_nodes", None)) not in (None, 1):
        conversion.group("resources")["nodes"] = nodes
    _resources(conversion, dict(task.pop("resources", None) or {}))
    conversion.environment(dict(task.pop("envs", None) or {}), "envs")
    conversion.secrets(dict(task.pop("secrets", None) or {}), "secrets")
    for target in dict(task.pop("file_mounts", None) or {}):
        conversion.lose("file_mounts", target, why="has no counterpart; put files into the code folder, or fetch them")
    conversion.lose_rest(task)
    conversion.closing_hints()


def _code(conversion: Conversion, workdir: Any) -> None:
    if isinstance(workdir, str):
        conversion.group("script")["code"] = workdir
        return
    conversion.group("script")["code"] = "."
    if workdir is not None:
        conversion.lose("workdir", why="a Git repository has no counterpart; check it out, and name its folder")
    else:
        conversion.hint("workdir", text="is absent; the spec's folder is sent as the code")


def _resources(conversion: Conversion, resources: dict[str, Any]) -> None:
    """Convert `resources`. Of alternatives every cloud, region and GPU is allowed; the broker takes the cheapest."""
    counts: set[int] = set()
    uses_spot: set[bool] = set()
    for choice, path in _alternatives(conversion, resources):
        _set_location(conversion, choice, *path)
        counts |= _accelerators(conversion, choice.get("accelerators"), *path)
        uses_spot.add(_uses_spot(conversion, choice.get("use_spot"), *path))
    conversion.group("resources")["spot"] = (
        "allowed" if len(uses_spot) > 1 else "only" if True in uses_spot else "never"
    )
    if counts:
        conversion.group("resources")["gpus"] = min(counts)
    if len(counts) > 1:
        conversion.lose(
            "resources", "accelerators", why=f"different counts; every GPU is asked for {min(counts)} times"
        )
    _autostop(conversion, resources.get("autostop"))
    rest = {key: value for key, value in resources.items() if key not in NEEDLESS}
    if (price := rest.pop("max_hourly_cost", None)) is not None:
        conversion.hourly_limit(price, "resources", "max_hourly_cost")
    for setting, key in SIZES.items():
        if (size := rest.pop(key, None)) is not None:
            conversion.least(setting, size, "resources", key)
    if str(rest.get("image_id")).startswith("docker:"):
        conversion.image(rest.pop("image_id").removeprefix("docker:"), "resources", "image_id")
    for name, value in dict(rest.pop("labels", None) or {}).items():
        conversion.spec.setdefault("labels", {})[name] = str(value)
    _recovery(conversion, rest.pop("job_recovery", None))
    conversion.lose_rest(rest, "resources")


def _alternatives(conversion: Conversion, resources: dict[str, Any]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Return the alternatives with their places. Each replaces settings of `resources` with its own."""
    common = {key: value for key, value in resources.items() if key not in ("any_of", "ordered")}
    alternatives: list[tuple[dict[str, Any], tuple[str, ...]]] = []
    for key in ("any_of", "ordered"):
        clouds = resources.get(key) or []
        for number, choice in enumerate(clouds):
            path = ("resources", key, str(number))
            conversion.lose_rest({k: v for k, v in choice.items() if k not in NEEDLESS}, *path)
            replaced = {"cloud", "region"} if "infra" in choice else {"infra"} if "cloud" in choice else set()
            alternatives.append(({k: v for k, v in common.items() if k not in replaced} | choice, path))
        if key == "ordered" and clouds:
            conversion.lose("resources", key, why="the order is lost; the broker takes the cheapest that fits")
        if clouds:
            _lose_combinations(conversion, [choice for choice, _ in alternatives], key)
    return alternatives or [(common, ("resources",))]


def _lose_combinations(conversion: Conversion, choices: list[dict[str, Any]], key: str) -> None:
    """Note alternatives that differ in more than one kind of setting, and those that leave a kind open."""
    kinds = {"place": PLACE, "GPU": {"accelerators"}, "use_spot": {"use_spot"}}
    values = {kind: [{k: c[k] for k in sorted(names) if c.get(k)} for c in choices] for kind, names in kinds.items()}
    different = [kind for kind, chosen in values.items() if any(value != chosen[0] for value in chosen)]
    if len(different) > 1:
        conversion.lose("resources", key, why=f"the combinations are lost; each {' and '.join(different)} is allowed")
    for kind in ("place", "GPU"):
        if kind in different and {} in values[kind]:
            conversion.lose("resources", key, why=f"an alternative with any {kind} is lost; name it")


def _uses_spot(conversion: Conversion, value: Any, *path: str) -> bool:
    if value not in (None, True, False):
        conversion.lose(*path, "use_spot", why=f"{value} is neither true nor false; on-demand is used")
    return value is True


def _set_location(conversion: Conversion, choice: dict[str, Any], *path: str) -> None:
    cloud, region, *zone = [*str(choice.get("infra") or "").split("/"), ""][:3]
    if any(zone):
        conversion.lose(*path, "infra", why=f"a zone ({zone[0]}) has no counterpart")
    for name in (cloud, choice.get("cloud")):
        if name and name != "*":
            conversion.providers([name], *path, "infra" if name == cloud else "cloud")
    for name in (region, choice.get("region")):
        if name and name != "*":
            conversion.add("regions", str(name))


def _accelerators(conversion: Conversion, written: Any, *path: str) -> set[int]:
    """Add the GPUs, and return their counts for a machine."""
    if written is None:
        return set()
    pairs = written.items() if isinstance(written, dict) else [(w, None) for w in _as_list(written)]
    counts = set()
    for text, value in pairs:
        name, _, count = str(text).partition(":")
        count = count if value is None else str(value)
        number = int(count) if count.isdecimal() else 1
        if count and not count.isdecimal():
            conversion.lose(*path, "accelerators", why=f"{count} of a GPU has no counterpart; one is asked for")
        conversion.add("accelerators", name)
        counts.add(number)
    return counts


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | set) else [value]


def _recovery(conversion: Conversion, value: Any) -> None:
    """Convert the restarts on errors. Preempted jobs resume anyway, in the cheapest place."""
    settings = dict(value) if isinstance(value, dict) else {"strategy": value}
    max_restarts = settings.pop("max_restarts_on_errors", None)
    if isinstance(max_restarts, int):
        conversion.spec["retry"] = {"max": max_restarts}
        conversion.lose(
            *("resources", "job_recovery", "max_restarts_on_errors"),
            why=f"becomes retry.max: {max_restarts}, which excludes errors of the program itself",
        )
    if settings.pop("strategy", None) is not None:
        conversion.lose(
            *("resources", "job_recovery", "strategy"), why="has no counterpart; a retry takes the cheapest that fits"
        )
    conversion.lose_rest(settings, "resources", "job_recovery")


def _autostop(conversion: Conversion, value: Any) -> None:
    """Note a stop of idle clusters, which a job does not need. Its hook and other settings are lost."""
    settings = dict(value) if isinstance(value, dict) else {}
    needless = {"idle_minutes", "down", "wait_for"}
    if value is not None:
        conversion.hint("resources", "autostop", text=MACHINES_END)
    conversion.lose_rest({k: v for k, v in settings.items() if k not in needless}, "resources", "autostop")
