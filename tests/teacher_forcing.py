"""The likeliest next token at each position of a fixed text, under a job's layout and from its last checkpoint.

torchrun ... -m teacher_forcing FILE --job.config_file job.toml ...       # tokens' numbers, one row a line, to FILE
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_kda.data import ByteTokenizer
from titan_kda.train import load_job, single_process_environment

ROWS, LENGTH = 8, 128


def text() -> torch.Tensor:
    """Python source, [ROWS, LENGTH]."""
    with open(argparse.__file__, "rb") as file:
        data = file.read(ROWS * LENGTH)
    return torch.tensor(list(data)).view(ROWS, LENGTH)


def main(path: str, args: list[str]) -> None:
    config = load_job(args)
    config.metrics.enable_tensorboard = False
    single_process_environment()
    from torchtitan.train import Trainer

    trainer = Trainer(config)
    assert trainer.checkpointer.load(step=-1), "no checkpoint"
    (model,) = trainer.model_parts
    model.eval()
    tokens = text().to(trainer.device)
    masks = model.get_attention_masks(tokens, ByteTokenizer())
    with torch.no_grad(), trainer.maybe_enable_amp:
        logits = model(tokens, masks)
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            for row in logits.float().argmax(-1).tolist():
                print(*row, file=file)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
