"""A price that users know lies in what `gpubroker quote` prints, for rows that fill the default length."""

from pathlib import Path

from benchmarks.known_price import MINUTES, USD, application_environment, asked, known, spec


async def test_mistral_7b_on_an_l40s_is_about_ten_minutes_and_45_cents(tmp_path: Path) -> None:
    async with application_environment(tmp_path) as environment:
        found = await known(environment, tmp_path)
        short = await known(environment, tmp_path, 128)
        said = await asked(environment, str(spec(tmp_path, 512)), "--explain")
    assert found.contains, found
    assert 5 < found.minutes[0] < MINUTES < found.minutes[1] < 20
    assert found.usd[0] < USD < found.usd[1]
    assert not short.contains, "a quarter of the tokens is done sooner"
    (line,) = found.document["lines"]
    assert line["plan"]["parallelism"] == "single"
    assert (line["tier"], line["runs"]) == ("transferred", 0)
    assert "no measurements on L40S" in line["evidence"]
    for words in ("assumed: tokens are bytes / 3.6", "boot 2 min 00 s", "no measurements on L40S", "$0."):
        assert words in said
