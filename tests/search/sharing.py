"""A process that searches on a study with a formula; tests start several, and kill them."""

import sys
import time
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.search.judge import Measured
from pipeline.search.loop import Limits, Search, Trained
from pipeline.search.space import Candidate
from tests.search.conftest import Bench, trained
from tests.search.landscape import completed


def rising(candidate: Candidate) -> Measured:
    """Memory and speed both rise with the micro-batch."""
    return completed(1000.0 + 100.0 * candidate.micro_batch, 10.0 * candidate.micro_batch)


def main(url: str, log: Path, seconds: float) -> None:
    """Search; each training takes this long, and is a line in the log."""
    bench = Bench(Path("."))
    bench.url = url
    prepared = bench.prepared("45%", sampler="grid")
    study = bench.study(prepared)

    def measure(config: RunConfig, *, name: str, tags: dict[str, str]) -> Trained:
        with log.open("a", encoding="utf-8") as file:
            file.write(name.partition(" ")[2] + "\n")
        time.sleep(seconds)
        training = config.training
        return trained(config, rising(Candidate(training.micro_batch, training.accumulation)), 1)

    Search(prepared.start, prepared.plan, study, measure, lambda entry: None).run(Limits())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
