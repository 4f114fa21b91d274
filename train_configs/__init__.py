"""The TOML jobs that ship with titan-kda, found by name: ``find_job("kda_debug")``."""

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def job_names() -> list[str]:
    """Names of the shipped jobs, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_job(name: str) -> Path:
    """The path of a TOML file, given as a path or as a shipped job's name (with or without ".toml").

    Raises:
        JobError: neither a file nor a shipped job.
    """
    from titan_kda.job_config import JobError, shown

    path = Path(name)
    if os.path.isfile(path):  # which is False, too, for what cannot be a file's name
        return path
    shipped = FOLDER / f"{path.name.removesuffix('.toml')}.toml"
    if path.name == name and os.path.isfile(shipped):
        return shipped
    raise JobError(f"no job file {shown(name)}, and no shipped job of that name; there are {', '.join(job_names())}")
