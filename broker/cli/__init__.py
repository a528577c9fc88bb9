"""`gpubroker`: the command line. Talks to the API only; `serve` is the daemon itself.

| module | holds |
|---|---|
| `main` | the commands by name |
| `submit`, `jobs`, `admin`, `daemon` | what they do, by concern |
| `submission`, `specfile`, `overrides`, `schema`, `template`, `pack` | from a spec file to a job |
| `watch`, `progress`, `summary`, `summaryview`, `plots`, `results` | from a job to its end and what it left |
| `quoteview`, `jobviews`, `words`, `doctor` | what people read |
| `shell`, `output`, `exits`, `usage`, `find` | what every command shares |
"""


def main() -> None:
    """The console script."""
    from broker.cli.main import app

    app()
