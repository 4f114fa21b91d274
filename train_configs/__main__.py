"""``python -m titan_kda.train_configs [NAME]``: the path of a shipped job, for torchrun; with no name, their names."""

import argparse
import sys

from titan_kda.job_config import JobError
from titan_kda.train_configs import find_job, job_names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m titan_kda.train_configs", description=__doc__)
    parser.add_argument("name", nargs="?", help="a shipped job; without it, their names are listed")
    name = parser.parse_args().name
    try:
        print("\n".join(job_names()) if name is None else find_job(name))
    except JobError as error:
        print(f"titan_kda.train_configs: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
