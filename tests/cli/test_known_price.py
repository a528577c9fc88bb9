"""A price that users know lies in what `gpubroker quote` prints, for rows that fill the default length."""

from pathlib import Path

from benchmarks.known_price import MINUTES, USD, application_environment, asked, known, spec


async def test_mistral_7b_on_an_l40s_is_about_ten_minutes_and_45_cents(tmp_path: Path) -> None:
    async with application_environment(tmp_path) as environment:
        known_price = await known(environment, tmp_path)
        short = await known(environment, tmp_path, 128)
        explanation = await asked(environment, str(spec(tmp_path, 512)), "--explain")
    assert known_price.contains, known_price
    assert 5 < known_price.minutes[0] < MINUTES < known_price.minutes[1] < 20
    assert known_price.usd[0] < USD < known_price.usd[1]
    assert not short.contains, "a quarter of the tokens is done sooner"
    (line,) = known_price.document["lines"]
    assert line["plan"]["parallelism"] == "single"
    assert (line["tier"], line["runs"]) == ("transferred", 0)
    assert "no measurements on L40S" in line["evidence"]
    for words in ("assumed: tokens are bytes / 3.6", "boot 2 min 00 s", "no measurements on L40S", "$0."):
        assert words in explanation
