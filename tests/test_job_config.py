"""Mistakes in a job are found in seconds, told in one line that names the setting, and leave no trace on disk."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import forked
import jobs
import pytest
import torch
from tokenizers import Tokenizer, models

from titan_kda.data import ByteTokenizer
from titan_kda.job_config import (
    JobError,
    check_dump_folder,
    check_layout,
    conforms,
    model_args_of,
    overrides,
    type_errors,
)
from titan_kda.model import Decoder
from titan_kda.train import load_job, main
from titan_kda.validate import GeneratingValidator, encode_prompts

KIMI = {"model.flavor": "kimi_linear_debug"}


def refused(folder, settings=None, *args, text=None):
    """The message with which a job is refused; fails unless it is one line and the job has written nothing."""
    toml = jobs.write_job(folder, settings)
    if text is not None:
        toml.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = sorted(folder.rglob("*"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(JobError) as caught:
        if not args:  # with no settings to parse, the parser only costs time
            patch.setattr("tyro.cli", lambda _, *, default, **kwargs: default)
        load_job(["--job.config_file", str(toml), *args])
    message = str(caught.value)
    assert message and "\n" not in message
    assert sorted(folder.rglob("*")) == before
    return message


def test_the_tiny_job_is_sound(tmp_path):
    """Else the refusals below could have another cause."""
    config = load_job(["--job.config_file", str(jobs.write_job(tmp_path))])
    assert config.training.steps == jobs.STEPS and config.architecture.dim == 64
    assert config.generation.prompts == jobs.TINY["generation"]["prompts"]


# ---- the file ----


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"trainng.steps": 3}, "unknown key trainng"),
        ({"generations.enable": True}, "unknown key generations"),
        ({".titel": "x"}, "unknown key titel"),
        ({"training.stesp": 3}, "unknown key training.stesp"),
        ({"kda.backend": "chunk"}, "unknown key kda.backend"),
        ({"architecture.heads": 4}, "unknown key architecture.heads"),
        ({"generation.foo.bar": 1}, "unknown key generation.foo"),
        ({"validation.dataloader.workers": 1}, "unknown key validation.dataloader.workers"),
        ({"training.steps": "20"}, "training.steps must be int, got '20'"),
        ({"training.steps": 2**63}, f"training.steps must be int, got {2**63} (64 bits are the most)"),
        ({"training.steps": "x" * 999}, f"training.steps must be int, got '{'x' * 99}... (1001 characters)"),
        ({"training.steps": True}, "training.steps must be int, got True"),
        ({"training.steps": 20.0}, "training.steps must be int, got 20.0"),
        ({"training.dataset_path": 3}, "training.dataset_path must be str, got 3"),
        ({"generation.prompts": 3}, "generation.prompts must be list of str, got 3"),
        ({"generation.prompts": "def "}, "generation.prompts must be list of str, got 'def '"),
        ({"generation.prompts": ["def ", 1]}, "generation.prompts must be list of str"),
        ({"generation.enable": 1}, "generation.enable must be bool, got 1"),
        ({"generation.temperature": "hot"}, "generation.temperature must be float, got 'hot'"),
        ({"generation.cuda_graph": 1}, "generation.cuda_graph must be bool, got 1"),
        ({"optimizer.lr": "1e-3"}, "optimizer.lr must be float, got '1e-3'"),
        ({"architecture.dim": 64.5}, "architecture.dim must be int, got 64.5"),
        ({"architecture.num_experts": 8.0}, "architecture.num_experts must be int, got 8.0"),
        ({"architecture.routed_scaling_factor": "2"}, "architecture.routed_scaling_factor must be float, got '2'"),
        ({"architecture.moe_renormalize": 1}, "architecture.moe_renormalize must be bool, got 1"),
        ({"architecture.lower_bound": True}, "architecture.lower_bound must be float, got True"),
        ({"architecture.layer_pattern": "kda"}, "architecture.layer_pattern must be list of str, got 'kda'"),
        ({"kda.recurrent_max_tokens": "64"}, "kda.recurrent_max_tokens must be int, got '64'"),
        ({"validation.dataloader.num_workers": "x"}, "validation.dataloader.num_workers must be int, got 'x'"),
        ({"lr_scheduler.decay_type": "step"}, "lr_scheduler.decay_type must be one of 'linear', 'sqrt', 'cosine'"),
        ({"activation_checkpoint.mode": "some"}, "activation_checkpoint.mode must be one of"),
    ],
)
def test_unknown_keys_and_wrong_types(tmp_path, settings, message):
    told = refused(tmp_path, settings)
    assert message in told and ("64 bits" in told) == ("64 bits" in message)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[training\nsteps = 1\n", "not TOML: "),
        ("[training]\nsteps = 1\n[training]\nsteps = 2\n", "not TOML: Cannot declare"),
        (b"[job]\ndescription = '\xff'\n", "not TOML: "),
        (f"a = {'9' * 5000}\n", "not TOML: "),
        (f"a = {'[' * 9999}{']' * 9999}\n", "not TOML that can be read: lists or tables in one another, too deep"),
        ('[job]\ncustom_config_module = "titan_kda.job_config"\n["☃\\n"]\n', r"unknown key '☃\n'; the sections are"),
        ("", '[job] needs custom_config_module = "titan_kda.job_config", got None'),
        ("job = 3\n", '[job] needs custom_config_module = "titan_kda.job_config", got None'),
        ("[[job]]\ncustom_config_module = 'titan_kda.job_config'\n", "[job] needs custom_config_module"),
        ("[job]\ncustom_config_module = ['titan_kda.job_config']\n", "[job] needs custom_config_module"),
        ("training = 3\n[job]\ncustom_config_module = 'titan_kda.job_config'\n", "training must be a table, got 3"),
        ("kda = [{}]\n[job]\ncustom_config_module = 'titan_kda.job_config'\n", "kda must be a table, got [{}]"),
        ("[job]\ncustom_config_module = 'titan_kda.job_config'\n", '[experimental] needs custom_import = "titan_kda.'),
    ],
)
def test_files_that_are_no_job(tmp_path, text, message):
    told = refused(tmp_path, text=text)
    assert told.startswith(f"{tmp_path / 'job.toml'}: {message}")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"job.custom_config_module": None}, '[job] needs custom_config_module = "titan_kda.job_config", got None'),
        ({"job.custom_config_module": "nothing"}, "[job] needs custom_config_module"),
        ({"experimental.custom_import": None}, '[experimental] needs custom_import = "titan_kda.register"'),
        ({"experimental.custom_import": "nothing"}, '[experimental] needs custom_import = "titan_kda.register"'),
        ({"model.name": "llama3"}, "model.name must be 'titan_kda', got 'llama3'"),
        ({"model.flavor": "340m"}, "model.flavor must be one of debugmodel, 340M, 1.3B, kimi_linear_debug,"),
        # backends
        ({"kda.train_backend": "recurrent"}, "train_backend must be 'chunk'"),
        ({"kda.train_backend": "parallel"}, "train_backend must be one of auto, chunk, recurrent, got 'parallel'"),
        ({"kda.eval_backend": "chunked"}, "eval_backend must be one of"),
        ({"kda.prefill_backend": ""}, "prefill_backend must be one of"),
        ({"kda.impl": "cuda"}, "impl must be one of auto, triton, reference, got 'cuda'"),
        ({"kda.recurrent_max_tokens": -1}, "recurrent_max_tokens must be at least 0, got -1"),
        # the model
        ({"architecture.key_width": 0}, "key_width must be at least 1, got 0"),
        ({"architecture.key_width": 300}, "key_width must be at most 256, got 300"),
        ({"architecture.n_layers": 0}, "n_layers must be at least 1, got 0"),
        ({"architecture.dim": -64}, "dim must be at least 1, got -64"),
        ({"architecture.conv_width": 0}, "conv_width must be at least 1, got 0"),
        ({"architecture.layer_pattern": ["kda", "mamba"]}, "layer_pattern: no mixer is called 'mamba'"),
        ({"architecture.layer_pattern": []}, "layer_pattern must name at least one mixer"),
        ({"architecture.lower_bound": 1}, "lower_bound must be negative and finite, got 1"),
        ({"architecture.gate": "sigmoid"}, "gate must be one of bounded, softplus, got 'sigmoid'"),
        ({"architecture.output_gate": "none"}, "output_gate must be one of"),
        ({"architecture.vocab_size": 100}, "vocab_size is 100, but the ByteTokenizer has 259 tokens"),
        ({"architecture.vocab_size": 513}, "vocab_size is 513"),
        ({"architecture.kv_lora_rank": 0}, "kv_lora_rank must be at least 1, got 0"),
        ({"architecture.qk_rope_head_dim": -1}, "qk_rope_head_dim must be at least 0, got -1"),
        (
            {"architecture.layer_pattern": ["gqa"], "architecture.kv_heads": 3},
            "kv_heads must divide the number of heads",
        ),
        ({"architecture.layer_pattern": ["gqa"], "architecture.attn_heads": 5}, "head_width must be set: 5 heads"),
        # experts
        ({**KIMI, "architecture.num_experts": -1}, "num_experts must be at least 0, got -1"),
        ({**KIMI, "architecture.num_experts_per_token": 9}, "must be at most num_experts = 8, got 9"),
        ({**KIMI, "architecture.num_expert_group": 4}, "num_expert_group must be 1, got 4"),
        ({**KIMI, "architecture.topk_group": 2}, "topk_group must be 1, got 2"),
        ({**KIMI, "architecture.load_balance_coeff": -0.1}, "load_balance_coeff must be at least 0, got -0.1"),
        ({**KIMI, "parallelism.expert_parallel_degree": 3}, "must divide the number of experts: got 3 with 8 experts"),
        ({**KIMI, "parallelism.expert_parallel_degree": 0}, "parallelism.expert_parallel_degree must be at least 1"),
        ({**KIMI, "parallelism.expert_parallel_degree": 2}, "parallelism.expert_parallel_degree: 2 x"),
        (
            {**KIMI, "parallelism.expert_parallel_degree": 2, "parallelism.tensor_parallel_degree": 2},
            "parallelism.expert_tensor_parallel_degree must be 2, got 1",
        ),
        ({**KIMI, "parallelism.expert_tensor_parallel_degree": 2}, "expert_tensor_parallel_degree must be 1, got 2"),
        (
            {**KIMI, "parallelism.tensor_parallel_degree": 2, "architecture.expert_width": 33},
            "tensor_parallel_degree must divide the experts' width: got 2 with expert_width = 33",
        ),
        (
            {**KIMI, "parallelism.tensor_parallel_degree": 4, "architecture.attn_heads": 6},
            "tensor_parallel_degree must divide the number of heads: got 4 with 6 heads",
        ),
        (
            {**KIMI, "parallelism.expert_parallel_comm_backend": "deepep"},
            "comm_backend must be 'standard', got 'deepep'",
        ),
        (
            {**KIMI, "parallelism.expert_parallel_degree": 2, "optimizer.early_step_in_backward": True},
            "optimizer.early_step_in_backward does not combine with expert parallelism",
        ),
        # layouts
        ({"parallelism.tensor_parallel_degree": 3}, "tensor_parallel_degree must divide the number of heads: got 3"),
        ({"parallelism.tensor_parallel_degree": 0}, "parallelism.tensor_parallel_degree must be at least 1, got 0"),
        ({"parallelism.tensor_parallel_degree": 4}, "does not make the number of processes, 1"),
        ({"parallelism.data_parallel_shard_degree": 2}, "does not make the number of processes, 1"),
        ({"parallelism.context_parallel_degree": 2}, "parallelism.context_parallel_degree must be 1, got 2"),
        ({"parallelism.pipeline_parallel_degree": 2}, "parallelism.pipeline_parallel_degree must be 1, got 2"),
        ({"parallelism.expert_parallel_degree": 2}, "parallelism.expert_parallel_degree must be 1, got 2"),
        (
            {"parallelism.tensor_parallel_degree": 2, "training.seq_len": 97},
            "training.seq_len must be a multiple of tensor_parallel_degree = 2",
        ),
        # training
        ({"training.steps": 0}, "training.steps must be at least 1, got 0"),
        ({"training.seq_len": 0}, "training.seq_len must be at least 1, got 0"),
        ({"training.local_batch_size": 0}, "training.local_batch_size must be at least 1, got 0"),
        ({"training.global_batch_size": 6}, "training.global_batch_size must be a multiple of"),
        ({"metrics.log_freq": 0}, "metrics.log_freq must be at least 1, got 0"),
        ({"optimizer.lr": -1.0}, "optimizer.lr must be at least 0, got -1.0"),
        ({"optimizer.name": "SGD"}, "optimizer.name must be 'Adam' or 'AdamW', got 'SGD'"),
        ({"validation.freq": 0}, "validation.freq must be at least 1, got 0"),
        ({"validation.steps": 0}, "validation steps must be positive or -1"),
        ({"checkpoint.keep_latest_k": 1}, "checkpoint.keep_latest_k must be 0 (keep all) or at least 2, got 1"),
        ({"checkpoint.interval": 0}, "checkpoint.interval must be at least 1, got 0"),
        # generation
        ({"validation.enable": False}, "generation.enable needs validation.enable = true"),
        ({"generation.freq": 0}, "generation.freq must be at least 1, got 0"),
        ({"generation.prompts": []}, "generation.prompts must hold at least one prompt"),
        (
            {"generation.prompts": ["x", "y" * 31], "generation.max_prompt_tokens": 31},
            "has 32 tokens, more than generation.max_prompt_tokens = 31",  # the beginning-of-sequence token counts
        ),
        ({"generation.max_prompt_tokens": 0}, "generation.max_prompt_tokens must be at least 1, got 0"),
        ({"generation.max_new_tokens": 0}, "generation.max_new_tokens must be at least 1, got 0"),
        ({"generation.temperature": -0.1}, "generation.temperature must be at least 0 and finite, got -0.1"),
        ({"generation.top_k": -1}, "generation.top_k must be at least 0, got -1"),
        ({"generation.top_p": 0.0}, "generation.top_p must be above 0 and at most 1, got 0.0"),
        ({"generation.top_p": 1.5}, "generation.top_p must be above 0 and at most 1, got 1.5"),
        # data
        ({"training.dataset": "wikipedia"}, "training.dataset must be one of"),
        ({"validation.dataset": "wikipedia"}, "validation.dataset must be one of"),
        ({"training.dataset": "text_files"}, "training.dataset = 'text_files' needs training.dataset_path"),
        (
            {"training.dataset": "text_files", "training.dataset_path": "no/such/folder"},
            "training.dataset_path is no folder: no/such/folder",
        ),
        ({"data.tokenizer": "bpe"}, "data.tokenizer must be one of 'byte', 'hf', got 'bpe'"),
        ({"data.tokenizer": "hf", "model.hf_assets_path": "no/such/folder"}, "model.hf_assets_path is no folder"),
        ({"training.dataloader.num_workers": 2}, "training.dataloader.num_workers must be 0 or 1, got 2: each worker"),
        ({"training.dataloader.num_workers": -1}, "training.dataloader.num_workers must be at least 0, got -1"),
        (
            {"validation.dataloader.prefetch_factor": 0},
            "validation.dataloader.prefetch_factor must be at least 1, got 0",
        ),
        ({"data.validation_fraction": 1.0}, "data.validation_fraction must be from 0 to below 1, got 1.0"),
        ({"optimizer.beta1": 1.0}, "optimizer.beta1 must be from 0 to below 1, got 1.0"),
        ({"optimizer.weight_decay": -0.1}, "optimizer.weight_decay must be at least 0, got -0.1"),
        # names that no file can have
        ({"job.dump_folder": "x" * 5000}, "characters): File name too long"),
        ({"job.dump_folder": "a\0b"}, r"job.dump_folder 'a\x00b': embedded null byte"),
        (
            {"training.dataset": "text_files", "training.dataset_path": "x" * 300},
            "training.dataset_path is no folder: x",
        ),
        (
            {"training.dataset": "text_files", "training.dataset_path": "~no such user/x"},
            "training.dataset_path is no folder: ~",
        ),
        ({"checkpoint.initial_load_path": "x" * 300}, "checkpoint.initial_load_path is no folder: xxx"),
        ({"data.tokenizer": "hf", "model.hf_assets_path": "x" * 300}, "model.hf_assets_path is no folder: xxx"),
    ],
)
def test_values_with_which_no_job_can_run(tmp_path, settings, message):
    assert message in refused(tmp_path, settings)


def test_documents_kept_apart_need_an_end_of_sequence_token(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokens = Tokenizer(models.WordLevel({f"w{i}": i for i in range(260)}, unk_token="w0"))
    tokens.save(str(folder / "tokenizer.json"))
    settings = {"data.tokenizer": "hf", "model.hf_assets_path": str(folder), "generation.enable": False}
    settings |= {"architecture.vocab_size": 264}
    told = refused(tmp_path, settings)
    assert told.startswith(
        "kda.reset_at_documents needs a tokenizer with an end-of-sequence token, and that in model.hf_"
    )
    load_job(["--job.config_file", str(jobs.write_job(tmp_path, settings | {"kda.reset_at_documents": False}))])


@pytest.mark.parametrize("name", ["temperature", "lr"])
def test_not_a_number_is_no_setting(tmp_path, name):
    section = "optimizer" if name == "lr" else "generation"
    text = jobs.to_toml(jobs.job_values(tmp_path, {f"{section}.{name}": 0.5}))
    told = refused(tmp_path, text=text.replace(f"\n{name} = 0.5", f"\n{name} = nan"))
    assert f"{section}.{name} must be float, got nan" in told


def test_validation_settings_do_not_matter_when_it_is_off(tmp_path):
    settings = {"validation.enable": False, "generation.enable": False, "validation.freq": 0}
    settings |= {"validation.dataset": "wikipedia", "validation.seq_len": 97, "generation.top_p": 7.0}
    toml = jobs.write_job(tmp_path, settings)
    load_job(["--job.config_file", str(toml)])


def test_triton_needs_a_gpu(tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    # These tests set TRITON_INTERPRET=1, with which Triton takes CPU tensors too; jobs do not.
    monkeypatch.setattr("titan_kda.kernels._operator._INTERPRETED", False)
    assert refused(tmp_path, {"kda.impl": "triton"}).startswith("kda.impl: ")


@pytest.mark.parametrize(
    "setting", ["training.enable_cpu_offload", "profiling.enable_profiling", "profiling.enable_memory_snapshot"]
)
def test_what_torchtitan_does_on_a_gpu_alone(tmp_path, setting):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert refused(tmp_path, {setting: True}) == f"{setting} must be false: it needs an accelerator, and there is none"


# ---- the command line ----


@pytest.mark.parametrize(
    "args, message",
    [
        (["--parallelism.tensor_parallel_degree", "3"], "must divide the number of heads"),
        (["--generation.top_p=2"], "generation.top_p must be above 0"),
        (["--kda.train-backend", "recurrent"], "train_backend must be 'chunk'"),
        (["--architecture.key_width", "300"], "key_width must be at most 256"),
        (["--experimental.custom_import=nothing"], "[experimental] needs custom_import"),
        (["--job.custom_config_module=nothing"], "job.custom_config_module cannot be set on the command line"),
        (["--job.config-file=other.toml"], "--job.config_file is given more than once"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, args, message):
    assert message in refused(tmp_path, None, *args)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--training.stesp", "3"], "unknown setting --training.stesp; did you mean --training.steps?"),
        (["--trainng.steps=3"], "unknown setting --trainng.steps; did you mean --training.steps?"),
        (["--lr", "3"], "unknown setting --lr; did you mean --optimizer.lr?"),
        (["--kda.head-width=3"], "unknown setting --kda.head-width; did you mean --architecture.head_width?"),
        (["--nothing"], "unknown setting --nothing; --help lists them all"),
        (["--training.steps", "many"], "training.steps must be int, got 'many'"),
        (["--training.steps=1.5"], "training.steps must be int, got '1.5'"),
        (["--training.steps"], "--training.steps needs a value: int"),
        (["--training.steps", "--optimizer.lr", "1"], "--training.steps needs a value: int"),
        (["--training.steps", "3", "4"], "unexpected argument '4': a setting is given as --section.key value"),
        (["--lr-scheduler.decay-type", "step"], "lr_scheduler.decay_type must be one of 'linear', 'sqrt', 'cosine'"),
        (["--architecture.tie_embeddings", "true"], "architecture.tie_embeddings must be True or False, got 'true'"),
        (["--generation.enable", "yes"], "--generation.enable takes no value, got 'yes': --section.no-key makes"),
        (["--generation.no-enable=true"], "--generation.no-enable takes no value, got 'true'"),
        (["stray"], "unexpected argument 'stray'"),
        (["-x"], "unexpected argument '-x'"),
        (
            ["--generation.prompts", "-x"],
            '--generation.prompts needs a value: list of str (one that begins with "-" as',
        ),
        (["--job.description", "-é\n"], r"""--job.description needs a value: str (one that begins with "-" as in"""),
        (["--training.steps", "-x"], "--training.steps needs a value: int"),
        (
            ["--training.steps", "9" * 5000],
            f"training.steps must be int, got '{'9' * 99}... (5002 characters) (64 bits",
        ),
        ([f"--generation.top_k={2**63}"], f"generation.top_k must be int, got '{2**63}' (64 bits are the most)"),
        (["--" + "x" * 99999], f"unknown setting '--{'x' * 97}... (100003 characters); --help lists them all"),
        (["--a\nb"], r"unknown setting '--a\nb'; --help"),
        (["y" * 99999], f"unexpected argument '{'y' * 99}... (100001 characters)"),
    ],
)
def test_arguments_that_cannot_be_parsed(tmp_path, monkeypatch, args, message):
    monkeypatch.setattr("tyro.cli", None)  # found before the parser shows them in a box and exits
    assert refused(tmp_path, None, *args).startswith(message)


def test_an_unknown_setting_is_one_line_of_the_command(tmp_path, capsys):
    toml = jobs.write_job(tmp_path)
    assert main(["--job.config_file", str(toml), "--training.stesp", "3"]) == 2
    told = capsys.readouterr()
    assert told.err == "titan_kda.train: error: unknown setting --training.stesp; did you mean --training.steps?\n"
    assert told.out == "" and list(tmp_path.iterdir()) == [toml]


def test_every_form_of_an_argument_that_the_parser_takes(tmp_path):
    args = ["--generation.no-enable", "--metrics.enable_tensorboard", "--training.max-norm", "1e3", "--debug.seed=None"]
    args += ["--architecture.lower-bound", "-3", "--architecture.tie-embeddings", "True", "--optimizer.eps=1e-9"]
    args += ["--generation.prompts=-x,--y", "--job.description", "- ☃"]
    args += ["--parallelism.module-fqns-per-model-part", "a,b", "c", "--quantize.grouped_mm.mx.fqns", "a,b"]
    config = load_job(["--job.config_file", str(jobs.write_job(tmp_path)), *args])
    assert config.metrics.enable_tensorboard and not config.generation.enable and config.debug.seed is None
    assert (config.training.max_norm, config.optimizer.eps, config.architecture.lower_bound) == (1e3, 1e-9, -3)
    assert config.architecture.tie_embeddings is True
    assert config.generation.prompts == ["-x", "--y"] and config.job.description == "- ☃"
    assert config.parallelism.module_fqns_per_model_part == [["a", "b"], ["c"]]


def test_the_command_line_wins_over_the_file(tmp_path):
    toml = jobs.write_job(tmp_path)
    args = ["--training.steps", "7", "--generation.prompts", "a,b", "--architecture.lower-bound=-3"]
    config = load_job([f"--job.config-file={toml}", *args])
    assert (config.training.steps, config.generation.prompts) == (7, ["a", "b"])
    assert config.architecture.lower_bound == -3


@pytest.mark.parametrize(
    "args, message",
    [
        (["--job.config_file", "no_such_job"], "no job file 'no_such_job', and no shipped job of that name; there are"),
        (["--job.config_file", ""], "no job file ''"),
        (["--job.config_file=."], "no job file '.'"),
        (["--job.config_file", "x" * 5000], f"no job file '{'x' * 99}... (5002 characters), and no shipped job"),
        (["--job.config_file"], "--job.config_file needs a TOML file or the name of a shipped job"),
        ([], "--job.config_file is missing"),
    ],
)
def test_no_job_file(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"titan_kda.train: error: {message}") and told.err.count("\n") == 1


# ---- as commands ----


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"training.stesp": 3}, "{}/job.toml: unknown key training.stesp"),
        ({"kda.eval_backend": "x"}, "[kda] or [architecture]: eval_backend must be one of"),
        ({"job.dump_folder": "{}/job.toml/run"}, "job.dump_folder '{}/job.toml/run': {}/job.toml is no folder"),
        ({"training.dataset": "text_files", "training.dataset_path": "{}/a\nb"}, "training.dataset_path is no folder:"),
    ],
)
def test_one_line_and_status_2(tmp_path, capsys, settings, message):
    """The last path has a line break in it."""
    settings = {name: value.format(tmp_path) if type(value) is str else value for name, value in settings.items()}
    toml = jobs.write_job(tmp_path, settings)
    assert main(["--job.config_file", str(toml)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("titan_kda.train: error: " + message.replace("{}", str(tmp_path)))
    assert told.count("\n") == 1 and list(tmp_path.iterdir()) == [toml]


def test_a_command_ends_at_once(tmp_path):
    toml = jobs.write_job(tmp_path, {"kda.train_backend": "recurrent"})
    run = jobs.run_job(toml)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith("titan_kda.train: error: [kda] or [architecture]: train_backend must be 'chunk'")
    assert list(tmp_path.iterdir()) == [toml]


def test_text_that_cannot_be_read_is_one_line_too(tmp_path):
    """Found when the data is read: after the start, but before anything is written over."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text('{"title": 3}\n')
    toml = jobs.write_job(tmp_path, {"training.dataset": "text_files", "training.dataset_path": "texts"})
    run = forked.run_job(toml)
    assert run.returncode == 2 and "Traceback" not in jobs.log_of(run)
    assert run.stderr.splitlines()[-1].startswith("titan_kda.train: error: training.dataset: text_files: texts/a.jsonl")
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


def test_a_job_that_diverges_stops_where_it_would_generate(tmp_path):
    """Else it would go on for ever, and keep checkpoints of nothing in place of good ones."""
    config = load_job(["--job.config_file", str(jobs.write_job(tmp_path))])
    model = Decoder(model_args_of(config))
    with torch.no_grad():
        model.init_weights(seed=0)
        model.norm.weight[0] = float("nan")
    validator = object.__new__(GeneratingValidator)  # with what generate() needs of a trainer
    validator.job_config, validator.tokenizer = config, ByteTokenizer()
    validator.prompts = encode_prompts(validator.tokenizer, config.generation)
    validator.maybe_enable_amp = nullcontext()
    with pytest.raises(JobError, match=r"^step 30: training has diverged: the model's logits are not finite$"):
        validator.generate(model, 30)
    assert model.training and not (tmp_path / "run").exists()


def test_torchtitans_own_command_refuses_it_as_well(tmp_path):
    toml = jobs.write_job(tmp_path, {"kda.train_backend": "recurrent"})
    kept = tmp_path / "run" / "checkpoint" / "step-10" / ".metadata"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"kept")
    env = jobs.environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    run = jobs.run_job(toml, module="torchtitan.train", env=env)
    assert run.returncode != 0
    assert "JobError: [kda] or [architecture]: train_backend must be 'chunk'" in run.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files == [kept] and kept.read_bytes() == b"kept"


# ---- the parts ----


@pytest.mark.parametrize(
    "value, kind, fits",
    [
        (1, int, True),
        (True, int, False),
        (1.0, int, False),
        (1, float, True),
        (1.5, float, True),
        (True, float, False),
        ("1", float, False),
        (True, bool, True),
        (0, bool, False),
        ("a", str, True),
        (None, str, False),
        (None, str | None, True),
        ("a", str | None, True),
        (3, str | None, False),
        (3, float | int, True),
        (["a"], list[str], True),
        ([], list[str], True),
        (["a", 1], list[str], False),
        (("a",), list[str], False),
        ([["a"]], list[list[str]] | None, True),
        ([["a"], "b"], list[list[str]] | None, False),
        ("x", Literal["x", "y"], True),
        ("z", Literal["x", "y"], False),
        ([1], Literal["x", "y"], False),
        ({"a": 1}, dict[str, int], True),
        ([], dict[str, int], False),
    ],
)
def test_conforms(value, kind, fits):
    assert conforms(value, kind) is fits


@dataclass
class _Inner:
    width: int = 1
    names: list[str] = field(default_factory=list)


@dataclass
class _Outer:
    inner: _Inner = field(default_factory=_Inner)
    rate: float | None = None


@pytest.mark.parametrize(
    "values, errors",
    [
        ({}, []),
        ({"inner": {"width": 2, "names": ["a"]}, "rate": 1}, []),
        (
            {"inner": {"width": "2", "names": [1]}},
            ["inner.width must be int, got '2'", "inner.names must be list of str"],
        ),
        ({"inner": {"with": 2}}, ["unknown key inner.with; [inner] has width, names"]),
        ({"iner": {}}, ["unknown key iner; the sections are inner, rate"]),
        ({"inner": 3, "rate": "x"}, ["inner must be a table, got 3", "rate must be float, got 'x'"]),
    ],
)
def test_type_errors_names_every_mistake(values, errors):
    told = list(type_errors(_Outer, values))
    assert len(told) == len(errors) and all(got.startswith(want) for got, want in zip(told, errors))


def test_overrides_are_what_the_job_sets(tmp_path):
    values = overrides(load_job(["--job.config_file", str(jobs.write_job(tmp_path))]))
    assert {"dim": 64, "n_heads": 4, "key_width": 16, "attn_type": "varlen", "eval_backend": "recurrent"}.items() <= (
        values.items()
    )
    assert "n_layers" not in values and "vocab_size" not in values  # the flavor's
    settings = {"kda.reset_at_documents": False, "architecture.tie_embeddings": False, "kda.prefill_backend": "chunk"}
    values = overrides(load_job(["--job.config_file", str(jobs.write_job(tmp_path, settings))]))
    assert values["attn_type"] == "sdpa" and values["tie_embeddings"] is False and values["prefill_backend"] == "chunk"


def test_layouts_that_processes_can_make_up(tmp_path):
    def check(processes, **settings):
        values = {f"parallelism.{name}": value for name, value in settings.items() if "." not in name}
        values |= {name.replace("__", "."): values.pop(f"parallelism.{name}") for name in settings if "__" in name}
        toml = jobs.write_job(tmp_path, values)
        check_layout(load_job(["--job.config_file", str(toml)], reads_data=False), processes)

    check(1)
    check(4)
    check(4, tensor_parallel_degree=2)
    check(4, data_parallel_replicate_degree=4)
    check(4, data_parallel_replicate_degree=2)  # HSDP
    check(4, tensor_parallel_degree=2, data_parallel_shard_degree=2)
    check(2, training__global_batch_size=16)
    check(2, tensor_parallel_degree=2, validation__steps=-1)
    early = {"optimizer__early_step_in_backward": True}
    check(2, training__global_batch_size=8, **early)
    check(4, data_parallel_replicate_degree=2, **early)
    kimi = {"model__flavor": "kimi_linear_debug"}
    check(4, expert_parallel_degree=4, **kimi)
    check(4, expert_parallel_degree=2, **kimi)
    check(8, expert_parallel_degree=2, data_parallel_replicate_degree=2, **kimi)
    check(8, expert_parallel_degree=2, tensor_parallel_degree=2, expert_tensor_parallel_degree=2, **kimi)
    for processes, settings, message in (
        (1, {"tensor_parallel_degree": 2}, "does not make the number of processes, 1"),
        (2, {"expert_parallel_degree": 4, **kimi}, "4 x expert_tensor_parallel_degree 1 must divide"),
        (2, {"expert_parallel_degree": 2, "data_parallel_replicate_degree": 2, **kimi}, "must be at least 2"),
        (3, {"tensor_parallel_degree": 2}, "does not make the number of processes, 3"),
        (4, {"data_parallel_shard_degree": 2}, "does not make the number of processes, 4"),
        (2, {"data_parallel_shard_degree": 0}, "does not make the number of processes, 2"),
        (4, {"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}, "DDP does not combine with tensor"),
        (2, {"training__global_batch_size": 4}, "multiple of local_batch_size x data-parallel ranks = 4 x 2, got 4"),
        (2, {"training__global_batch_size": 0}, "got 0"),
        (2, {"validation__steps": -1}, "validation.steps must be above 0 with several data-parallel ranks"),
        (2, {"data_parallel_replicate_degree": 2, **early}, "early_step_in_backward does not combine with DDP"),
        (1, {"training__global_batch_size": 8, **early}, "does not combine with training.global_batch_size"),
    ):
        with pytest.raises(JobError, match=message):
            check(processes, **settings)


def test_a_layout_planned_by_one_process_needs_its_number_of_ranks(tmp_path, monkeypatch):
    settings = {"comm.mode": "fake_backend", "parallelism.data_parallel_replicate_degree": 8}
    monkeypatch.delenv("NGPU", raising=False)
    assert (
        refused(tmp_path, settings) == "comm.mode = 'fake_backend' needs the number of ranks in the environment's NGPU"
    )
    monkeypatch.setenv("NGPU", "4")
    assert "does not make the number of processes, 4" in refused(tmp_path, settings)
    monkeypatch.setenv("NGPU", "8")
    load_job([f"--job.config_file={jobs.write_job(tmp_path, settings)}"])
    assert "context_parallel_degree must be 1, got 2: KDA layers" in refused(
        tmp_path, settings | {"parallelism.context_parallel_degree": 2}
    )


def test_dump_folder(tmp_path, monkeypatch):
    check_dump_folder(str(tmp_path))
    check_dump_folder(str(tmp_path / "a" / "b"))
    check_dump_folder("a/b")
    (tmp_path / "file").write_text("")
    for path in ("file", "file/b/c"):
        with pytest.raises(JobError, match=rf"^job\.dump_folder .*: {tmp_path / 'file'} is no folder$"):
            check_dump_folder(str(tmp_path / path))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests' own user may well be allowed anything
    with pytest.raises(JobError, match=rf"^job\.dump_folder .*: {tmp_path} cannot be written to$"):
        check_dump_folder(str(tmp_path / "run"))
