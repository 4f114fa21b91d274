"""What gets installed: the wheel's files, that it runs from anywhere, and how much an import brings."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import jobs
import pytest
import torch

import titan_kda
from titan_kda.checkpoint import validate_checkpoint_settings
from titan_kda.job_config import model_args_of
from titan_kda.model import Decoder
from titan_kda.sample import main as sample_main
from titan_kda.train import load_job
from titan_kda.train_configs import find_job, job_names

CHECKOUT = Path(__file__).resolve().parents[1]
SOURCES = ("kernels", "titan_kda", "train_configs")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheels that pip asks this project's build backend for: "wheel", and "editable" for ``pip install -e``.

    The backend (setuptools, which torch itself requires) is called in this environment, so that nothing is fetched.
    It works on a copy, since it leaves a build folder beside what it builds.
    """
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, source)
    for name in SOURCES:
        # Links stay links: the package must find kernels/ through them.
        shutil.copytree(CHECKOUT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))

    def build(kind):
        code = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder / kind)!r})"
        (folder / kind).mkdir()
        done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        (wheel,) = (folder / kind).glob("*.whl")
        return wheel

    return {"source": source, "wheel": build("wheel"), "editable": build("editable")}


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, built, tmp_path_factory):
    """The interpreter of an environment with that wheel, and where titan_kda lies then.

    Links bring this environment's other packages.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    where = site if request.param == "wheel" else built["source"]
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(place).iterdir():
            if "titan_kda" not in entry.name and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    with zipfile.ZipFile(built[request.param]) as wheel:
        wheel.extractall(site)
    return folder / "bin" / "python", where / "titan_kda"


def run(python, *args, cwd, **env):
    done = subprocess.run(
        [python, *args],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_holds_the_package_and_nothing_beside_it(built):
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        info = wheel.read(metadata).decode()
    installed = {name for name in names if ".dist-info/" not in name}
    there = {
        str(Path("titan_kda", "" if part == "titan_kda" else part, path.relative_to(CHECKOUT / part)))
        for part in SOURCES
        for suffix in ("*.py", "*.toml", "py.typed")
        for path in (CHECKOUT / part).rglob(suffix)
    }
    assert installed == there  # so no top-level kernels or train_configs either
    assert {
        "titan_kda/py.typed",
        "titan_kda/kernels/chunk/__init__.py",
        "titan_kda/train_configs/kda_debug.toml",
    } < there
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert f"\nVersion: {titan_kda.__version__}\n" in info
    assert "\nLicense-Expression: BSD-3-Clause\n" in info


@pytest.mark.parametrize("place", ["checkout", "elsewhere"])
def test_commands_run_from_the_checkout_and_from_elsewhere(python, place, tmp_path):
    interpreter, package = python
    cwd, package = (CHECKOUT, CHECKOUT / "titan_kda") if place == "checkout" else (tmp_path, package)
    assert run(interpreter, "-m", "titan_kda.train", "--version", cwd=cwd) == f"titan-kda {titan_kda.__version__}\n"
    path = Path(run(interpreter, "-m", "titan_kda.train_configs", "kda_debug", cwd=cwd).strip())
    assert path.is_absolute() and path.samefile(package / "train_configs" / "kda_debug.toml")
    help_text = run(interpreter, "-m", "titan_kda.train", "--help", cwd=cwd, COLUMNS="200")
    assert "--training.steps" in help_text and "--kda.train-backend" in help_text
    # A top-level module of this name is another project's, and transformers looks for it.
    where = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    assert not run(interpreter, "-c", where, cwd=tmp_path).startswith((str(CHECKOUT), str(package.parent)))


def test_sample_help(capsys):
    for flag, text in (("--help", "--prompt-file"), ("--version", f"titan-kda {titan_kda.__version__}\n")):
        with pytest.raises(SystemExit) as end:
            sample_main([flag])
        shown = capsys.readouterr()
        assert end.value.code == 0 and text in shown.out and shown.err == ""


def test_train_configs_command(tmp_path):
    names = jobs.run_module("titan_kda.train_configs", cwd=tmp_path)
    assert names.stdout.split() == job_names() and "kda_debug" in names.stdout.split()
    wrong = jobs.run_module("titan_kda.train_configs", "kda_debgu", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("titan_kda.train_configs: error: ") and "kda_debug" in wrong.stderr
    assert wrong.stderr.count("\n") == 1


def test_find_job_takes_a_path_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = find_job("kda_debug")
    assert shipped == find_job("kda_debug.toml") and shipped.parent.name == "train_configs"
    (tmp_path / "kda_debug").write_text("")
    assert find_job("kda_debug") == Path("kda_debug")
    with pytest.raises(ValueError, match=r"no job file './kda_debug\.toml'"):
        find_job("./kda_debug.toml")  # a path, so no shipped job


def test_importing_the_package_brings_nothing_heavy(tmp_path):
    code = "import sys, titan_kda; titan_kda.__version__; print(sorted({m.split('.')[0] for m in sys.modules}))"
    modules = run(sys.executable, "-c", code, cwd=tmp_path, **jobs.environment())
    assert not {"torch", "triton", "torchtitan", "numpy", "datasets"} & set(eval(modules))


def test_importing_the_kernels_needs_no_torchtitan_and_compiles_nothing(tmp_path):
    code = (
        "import sys, torch, titan_kda.kernels as kernels; "
        "assert not [m for m in sys.modules if m.split('.')[0] in ('torchtitan', 'datasets', 'torchdata')]; "
        "assert not torch.cuda.is_initialized(); "
        "print(*[m for m in sys.modules if m.startswith('titan_kda')]); "
        "assert all(callable(getattr(kernels, name)) for name in kernels.__all__)"
    )
    cache = tmp_path / "triton-cache"
    modules = run(sys.executable, "-c", code, cwd=tmp_path, **jobs.environment(TRITON_CACHE_DIR=str(cache)))
    others = {m for m in modules.split() if not m.startswith("titan_kda.kernels")}
    assert others == {"titan_kda", "titan_kda._version"}
    assert not cache.exists() or not any(cache.iterdir())


def test_the_layer_is_found_by_its_name():
    assert titan_kda.KimiDeltaAttention.__module__ == "titan_kda.attention"
    with pytest.raises(AttributeError, match="no attribute 'KimiDeltaAttentoin'"):
        titan_kda.KimiDeltaAttentoin  # noqa: B018


@pytest.mark.parametrize("name", job_names())
def test_shipped_jobs_are_sound_and_build_their_model(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with_bytes = 'tokenizer = "hf"' not in find_job(name).read_text()
    config = load_job(["--job.config_file", name], reads_data=with_bytes)  # others need a tokenizer's files
    assert validate_checkpoint_settings(config) == []
    args = model_args_of(config)
    with torch.device("meta"):
        model = Decoder(args)
    nparams, flops = args.get_nparams_and_flops(model, config.training.seq_len)
    share = 2 if args.num_experts == 0 else 20  # of the parameters, at the least, a token meets one in so many
    assert nparams == sum(p.numel() for p in model.parameters()) > 0 and flops > 6 * nparams / share
    assert not list(tmp_path.iterdir())
