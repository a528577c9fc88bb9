"""Reads spot traces from files, for `gpubroker simulate` and `benchmarks.spot_table`."""

import gzip
import zlib
from pathlib import Path

from broker.simulation.traces import COLUMNS, Trace, TraceError, parse_trace

SUFFIXES = (".csv", ".csv.gz")


def read_trace(path: Path, tick_s: int = 600) -> Trace:
    """Return the trace in a file; see `parse_trace`. Raises TraceError."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            return parse_trace(path.name.partition(".")[0], file, tick_s, place=str(path))
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise TraceError(f"{path}: no complete gzip file; compress it again or write plain CSV") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: no text in UTF-8; write plain CSV with the header {','.join(COLUMNS)}") from None
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}; name a readable file") from None


def read_traces(folder: Path, tick_s: int = 600) -> list[Trace]:
    """Return the traces of all CSV files in a folder, by name. Raises TraceError."""
    try:
        files = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIXES))
    except OSError as e:
        raise TraceError(f"{folder}: {e.strerror}; name a folder of CSV files, or `synthetic`") from None
    if not files:
        raise TraceError(f"{folder}: no file ends in .csv or .csv.gz; name a folder of spot traces")
    return [read_trace(path, tick_s) for path in files]
