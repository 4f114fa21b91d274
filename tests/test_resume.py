"""A job that is killed or stopped goes on from its last whole checkpoint as if nothing had happened."""

import json
import os
import re
import signal
import subprocess
import sys

import forked
import jobs
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_kda.checkpoint import latest_step


def start(toml):
    command = [sys.executable, "-m", "titan_kda.train", f"--job.config_file={toml}"]
    return subprocess.Popen(
        command,
        cwd=toml.parent,
        env=jobs.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


def run_until(toml, line, number):
    """Runs the job, sends signal ``number`` when ``line`` appears in its log; returns the log and the exit status."""
    process = start(toml)
    log = []
    for text in process.stdout:
        log.append(text)
        if number is not None and line in text:
            process.send_signal(number)
            number = None
    process.wait(timeout=60)
    assert number is None, f"{line!r} never came:\n" + "".join(log[-20:])
    return "".join(log), process.returncode


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run = forked.run_job(jobs.write_job(folder, {"metrics.enable_tensorboard": True}))
    assert run.returncode == 0, jobs.log_of(run)[-3000:]
    log = jobs.log_of(run)
    return jobs.losses(log), jobs.validation_losses(log), folder / "run", log


def test_killed_and_stopped_runs_go_on_exactly(uninterrupted, tmp_path):
    losses, validation_losses, folder, _ = uninterrupted
    toml = jobs.write_job(tmp_path)
    checkpoints = tmp_path / "run" / "checkpoint"

    log, status = run_until(toml, "Saving the checkpoint", signal.SIGKILL)  # in the first save: nothing to go on from
    assert status == -signal.SIGKILL
    log, status = run_until(toml, "step: 14 ", signal.SIGKILL)
    if latest_step(checkpoints) == 10 and "Training starts at step 1\n" in log:
        assert jobs.losses(log) == {n: losses[n] for n in range(1, max(jobs.losses(log)) + 1)}
    (tmp_path / "run" / "samples" / "step-10.jsonl").unlink()  # as if the kill had come before they were written

    log, status = run_until(toml, "step: 12 ", signal.SIGTERM)
    assert status == 0, log[-3000:]
    assert "Training starts at step 11" in log
    assert "once more to stop at once" in log
    stopped = latest_step(checkpoints)
    assert stopped is not None and 12 <= stopped < 20
    assert f"Stopped at step {stopped} with a checkpoint" in log
    assert jobs.losses(log) == {n: losses[n] for n in range(11, stopped + 1)}
    assert json.loads((tmp_path / "run" / "samples" / "step-10.jsonl").read_text().splitlines()[0])["step"] == 10

    run = forked.run_job(toml)
    assert run.returncode == 0
    log = jobs.log_of(run)
    assert jobs.losses(log) == {n: losses[n] for n in range(stopped + 1, 21)}
    assert jobs.validation_losses(log) == {20: validation_losses[20]}
    assert jobs.samples(tmp_path / "run") == jobs.samples(folder)

    # A finished run can be trained further, since its last step was saved whole, and by another number of processes.
    dealt = r"Saved by {} .*, continued by {}: .* dealt anew, (\d+) of (\d+) pieces to rank 0"
    run = forked.run_job(toml, "--training.steps", 22, processes=2)
    assert run.returncode == 0
    log = jobs.log_of(run)
    assert sorted(jobs.losses(log)) == [21, 22]
    share, pieces = map(int, re.search(dealt.format(1, 2), log).groups())
    assert pieces - 40 < 2 * share < pieces
    # It then has nothing left to do, and says so by leaving everything as it is.
    run = forked.run_job(toml, "--training.steps", 22)
    assert run.returncode == 0
    log = jobs.log_of(run)
    assert jobs.losses(log) == {}
    left, pieces = map(int, re.search(dealt.format(2, 1), log).groups())
    assert 2 * share - 20 < left < 2 * share


def test_the_second_signal_stops_at_once(tmp_path):
    process = start(jobs.write_job(tmp_path, {"training.steps": 2000}))
    for text in process.stdout:
        if "step:  2 " in text:
            # Both before the step ends, whatever its length: the first, of either kind, restores both defaults.
            os.kill(process.pid, signal.SIGINT)
        if "once more" in text:
            os.kill(process.pid, signal.SIGTERM)
            break
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGTERM, 0)


def test_generation_changes_no_loss(uninterrupted, tmp_path):
    losses, validation_losses, *_ = uninterrupted
    run = forked.run_job(jobs.write_job(tmp_path, {"generation.enable": False}))
    assert run.returncode == 0
    assert jobs.losses(jobs.log_of(run)) == losses
    assert jobs.validation_losses(jobs.log_of(run)) == validation_losses
    assert not (tmp_path / "run" / "samples").exists()


def test_samples_go_to_the_log_to_a_file_and_to_tensorboard(uninterrupted):
    _, _, folder, log = uninterrupted
    samples = jobs.samples(folder)
    assert sorted(samples) == [1, 10, 20]
    events = {}
    for path in folder.glob("tb/**/events.out.tfevents.*"):
        accumulator = EventAccumulator(str(path), size_guidance={"tensors": 0}).Reload()
        for tag in accumulator.Tags()["tensors"]:
            for event in accumulator.Tensors(tag):
                events[tag, event.step] = event.tensor_proto.string_val[0].decode()
    for step, rows in samples.items():
        assert [row["prompt"] for row in rows] == ["def ", "import os, s"]
        for row in rows:
            assert len(row["tokens"]) <= 12 and row["step"] == step
            assert f"step {step} sample: {row['prompt']}{row['text'].split(chr(10))[0]}" in log
            written = events[f"samples/{row['prompt'].strip()}/text_summary", step]
            text = row["prompt"] + row["text"]
            assert written == "\n".join("    " + line for line in text.split("\n"))  # Markdown's for "as it stands"
