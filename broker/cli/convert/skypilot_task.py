"""SkyPilot's task YAML as a spec (docs.skypilot.co, "SkyPilot YAML", read in November 2026)."""

from pathlib import Path
from typing import Any

from broker.cli.convert.conversion import Conversion

NEEDLESS = ("autostop", "cloud", "region", "infra", "accelerators", "any_of", "ordered", "use_spot")
"""Settings of `resources` that are read; a job's machines are destroyed at its end without `autostop`."""


def convert_skypilot(conversion: Conversion) -> None:
    """Convert the document. Raises BadInput if it runs nothing."""
    task = dict(conversion.document.data)
    conversion.name(task.pop("name", None), Path(conversion.document.name).stem)
    run = task.pop("run", None)
    if not isinstance(run, str) or not run.strip():
        raise conversion.refuse("run", "is missing; a job is a program that ends")
    _code(conversion, task.pop("workdir", None))
    conversion.command(run, setup=str(task.pop("setup", None) or ""))
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
    use_spot = resources.get("use_spot")
    conversion.group("resources")["spot"] = "only" if use_spot else "never"
    counts: set[int] = set()
    _place(conversion, resources, "resources")
    counts |= _accelerators(conversion, resources.get("accelerators"), "resources")
    for key in ("any_of", "ordered"):
        for number, choice in enumerate(resources.get(key) or []):
            path = ("resources", key, str(number))
            _place(conversion, choice, *path)
            counts |= _accelerators(conversion, choice.get("accelerators"), *path)
            conversion.lose_rest({k: v for k, v in choice.items() if k not in NEEDLESS}, *path)
        if key == "ordered" and resources.get(key):
            conversion.lose("resources", key, why="the order is lost; the broker takes the cheapest that fits")
    if counts:
        conversion.group("resources")["gpus"] = min(counts)
    if len(counts) > 1:
        conversion.lose(
            "resources", "accelerators", why=f"different counts; every GPU is asked for {min(counts)} times"
        )
    rest = {key: value for key, value in resources.items() if key not in NEEDLESS}
    if (price := rest.pop("max_hourly_cost", None)) is not None:
        conversion.group("resources")["max_usd_per_hour"] = price
    for name, value in dict(rest.pop("labels", None) or {}).items():
        conversion.spec.setdefault("labels", {})[name] = str(value)
    _recovery(conversion, rest.pop("job_recovery", None))
    conversion.lose_rest(rest, "resources")


def _place(conversion: Conversion, choice: dict[str, Any], *path: str) -> None:
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
        number = value if isinstance(value, int) else int(count) if count.isdecimal() else 1
        if count and not count.isdecimal():
            conversion.lose(*path, "accelerators", why=f"{count} of a GPU has no counterpart; one is asked for")
        conversion.add("accelerators", name)
        counts.add(number)
    return counts


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | set) else [value]


def _recovery(conversion: Conversion, written: Any) -> None:
    """Convert the restarts on errors. Preempted jobs resume anyway, in the cheapest place."""
    if isinstance(written, dict) and isinstance(most := written.get("max_restarts_on_errors"), int):
        conversion.spec["retry"] = {"max": most}
        conversion.lose(
            *("resources", "job_recovery", "max_restarts_on_errors"),
            why=f"becomes retry.max: {most}, which excludes errors of the program itself",
        )
