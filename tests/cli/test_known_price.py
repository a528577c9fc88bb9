"""The interval of `gpubroker quote` contains a published price if rows fill the default length."""

from pathlib import Path

from benchmarks.known_price import MINUTES, USD, application_environment, quote_output, quoted, spec


async def test_mistral_7b_on_an_l40s_is_about_ten_minutes_and_45_cents(tmp_path: Path) -> None:
    async with application_environment(tmp_path) as environment:
        figures = await quoted(environment, tmp_path)
        short = await quoted(environment, tmp_path, 128)
        explanation = await quote_output(environment, str(spec(tmp_path, 512)), "--explain")
    assert figures.contains, figures
    assert 5 < figures.minutes[0] < MINUTES < figures.minutes[1] < 20
    assert figures.usd[0] < USD < figures.usd[1]
    assert not short.contains, "a quarter of the tokens takes less time"
    (line,) = figures.document["lines"]
    assert line["plan"]["parallelism"] == "single"
    assert (line["tier"], line["runs"]) == ("transferred", 0)
    assert "no measurements on L40S" in line["evidence"]
    for words in ("assumed: tokens are bytes / 3.6", "boot 2 min 00 s", "no measurements on L40S", "$0."):
        assert words in explanation
