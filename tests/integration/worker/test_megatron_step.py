"""Against the real megatron-core: a step of its training (forward and backward of micro batches, finalize_model_grads, its
optimizer with clipping and weight decay: Adam, or SGD with momentum) and one of ours, from the same weights on the same
samples, give the same weights, and count the same zeros in gradients.
Its dynamic loss scale and ours go the same way. Usage: test_megatron_step.py WORKER MOBULA LOSS_SCALE_TRACE"""

import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest
import warnings

warnings.filterwarnings("ignore")

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from gang import tool as run
from index_file import write_tokens
import megatron_gang
from megatron_gang import BATCH, SEQ, VOCAB, Shape

WORKER, MOBULA, TRACE = (os.path.abspath(p) for p in sys.argv[1:4])
del sys.argv[1:4]
SAMPLES, WEIGHT_DECAY, CLIP = 8, 0.1, 0.5
EOD = VOCAB - 1  # NullTokenizer's
LR = {"adam": 1e-2, "sgd": 1.0}


def on_cpu(function):
    return lambda *a, **k: function(*a, **{**k, **({"device": "cpu"} if str(k.get("device")).startswith("cuda") else {})})


# The optimizer asks for CUDA by name, whatever its parameters are on.
torch.tensor, torch.zeros = on_cpu(torch.tensor), on_cpu(torch.zeros)
TYPE = torch.Tensor.type
torch.Tensor.type = lambda self, *a, **k: TYPE(self, *a, **k) if a or k else "torch.cuda.FloatTensor"


def positions_of(x):
    """Of Megatron-LM's --reset-position-ids: they begin anew behind an end of document."""
    out = torch.arange(SEQ).repeat(len(x), 1)
    for row, ids in zip(out, x):
        for at in (ids == EOD).nonzero().flatten().tolist():
            row[at + 1:] -= row[at] + 1
    return out


def step_main(rank, s, folder, rule, n_steps, resets):
    """Saves weights, takes steps, each on samples of its own, and saves those."""
    folder = pathlib.Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=s.tp)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=s.tp)
    torch.manual_seed(11)
    config = megatron_gang.config_of(s)
    model = megatron_gang.chunk_of(s, config, 0, 0)
    with torch.no_grad():
        megatron_gang.stir(s, [model], 0)
    for state in ("before", "after"):
        (folder / state / "iter_0000020" / megatron_gang.file_of(s, rank, 0)).parent.mkdir(parents=True)
    megatron_gang.save(s, folder / "before" / "iter_0000020" / megatron_gang.file_of(s, rank, 0), [model])

    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    how = OptimizerConfig(optimizer=rule, lr=LR[rule], weight_decay=WEIGHT_DECAY, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-4,
                          clip_grad=CLIP, sgd_momentum=0.8, log_num_zeros_in_grad=True)
    optimizer = get_megatron_optimizer(how, [ddp], get_standard_config_overrides(how))
    OptimizerParamScheduler(  # which gives norms and biases no weight decay
        optimizer, init_lr=0.0, max_lr=LR[rule], min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=100, lr_decay_style="constant",
        start_wd=WEIGHT_DECAY, end_wd=WEIGHT_DECAY, wd_incr_steps=100, wd_incr_style="constant")
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    samples = iter(torch.load(folder / "samples.pt").split(BATCH))

    def forward(batches, chunk):
        x = next(batches)
        positions = positions_of(x[:, :-1]) if resets else torch.arange(SEQ).repeat(BATCH, 1)
        mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
        losses = chunk(input_ids=x[:, :-1], position_ids=positions, attention_mask=mask, labels=x[:, 1:])
        return losses, lambda out: (out.mean(), {"lm loss": out.mean().detach()})

    lines = []
    for _ in range(n_steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        told = get_forward_backward_func()(forward_step_func=forward, data_iterator=samples, model=[ddp],
                                           seq_length=SEQ, num_microbatches=SAMPLES // BATCH, micro_batch_size=BATCH,
                                           forward_only=False)
        done, norm, zeros = optimizer.step()
        assert done
        lines.append((float(torch.stack([t["lm loss"] for t in told]).mean()), float(norm), float(zeros)))
    megatron_gang.save(s, folder / "after" / "iter_0000020" / megatron_gang.file_of(s, rank, 0), [model])
    if rank == 0:
        torch.save(lines, folder / "told.pt")
    dist.barrier()
    dist.destroy_process_group()


class StepTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="mobula-megatron-step-")
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)

    def model(self, directory, s):
        """Whole tensors, by names of their file; of several ranks through our converter."""
        run(MOBULA, "checkpoint", "convert", "--to", "megatron", "--transformer-impl", "local", "--no-load-optim", self.path / directory,
            self.path / f"{directory}-whole")
        file = next((self.path / f"{directory}-whole").rglob(megatron_gang.NAME))
        return {n: t for n, t in torch.load(file, weights_only=False)["model"].items() if t is not None}

    def check(self, s, rule="adam", n_steps=1, resets=False):
        n = n_steps * SAMPLES
        tokens = torch.randint(0, VOCAB - 1, (n * SEQ + 1,), generator=torch.Generator().manual_seed(3))
        if resets:
            tokens[torch.rand(len(tokens), generator=torch.Generator().manual_seed(4)) < 0.2] = EOD
        order = numpy.arange(n)
        numpy.random.RandomState(1234).shuffle(order)  # Megatron-LM's order of one document's samples
        write_tokens(self.path / "data", tokens.numpy())
        torch.save(torch.stack([tokens[i * SEQ:i * SEQ + SEQ + 1] for i in order]), self.path / "samples.pt")
        torch.multiprocessing.start_processes(step_main, (s, str(self.path), rule, n_steps, resets), nprocs=s.tp, start_method="fork")
        for state in ("before", "after"):
            (self.path / state / "latest_checkpointed_iteration.txt").write_text("20")
        told = torch.load(self.path / "told.pt")
        log = run(WORKER, "--use-checkpoint-args", "--distributed-backend", "gloo", "--seq-length", SEQ,
                  "--micro-batch-size", BATCH, "--global-batch-size", SAMPLES, "--train-iters", n_steps, "--lr", LR[rule],
                  "--lr-decay-style", "constant", "--weight-decay", WEIGHT_DECAY, "--adam-beta2", "0.95", "--adam-eps", "1e-4",
                  "--clip-grad", CLIP, "--eval-iters", 0, "--log-interval", 1, "--tokenizer-type", "NullTokenizer",
                  "--vocab-size", VOCAB - 1, "--data-path", self.path / "data", "--split", "100,0,0", "--pretrained-checkpoint", self.path / "before", "--save", self.path / "ours",
                  "--save-interval", n_steps, "--optimizer", rule, "--sgd-momentum", "0.8", "--log-num-zeros-in-grad",
                  *(["--reset-position-ids"] if resets else []))
        lines = [line for line in log.splitlines() if "lm loss:" in line]
        self.assertEqual(len(lines), n_steps)
        for line, (loss, norm, zeros) in zip(lines, told):
            self.assertGreater(norm, CLIP)  # so that it is clipped
            self.assertLess(abs(float(line.split("lm loss: ")[1].split()[0]) - loss), 1e-5)
            self.assertLess(abs(float(line.split("grad norm: ")[1].split()[0]) - norm), 1e-3)
            # But for the one or other that is 0 by rounding.
            self.assertLessEqual(abs(float(line.split("num zeros: ")[1].split()[0]) - zeros), 8)
        if s.untied:  # a token that does not occur has no gradient but as an output
            self.assertGreater(told[0][2], 100)
        before, want, got = (self.model(d, s) for d in ("before", "after", "ours"))
        self.assertEqual(set(got), set(want))
        for name, value in want.items():
            self.assertGreater(float((value - before[name]).abs().max()), LR[rule] / (10 if rule == "adam" else 10000), name)
            self.assertLess(float((value - got[name]).abs().max()), 1e-5, name)

    def test_learned_positions_biases_and_tied_embeddings(self):
        self.check(Shape())

    def test_gates_and_query_groups(self):
        self.check(Shape(llama=True, untied=True))

    def test_two_ranks_that_share_a_model(self):
        self.check(Shape(tp=2, llama=True))

    def test_sgd_with_momentum(self):
        self.check(Shape(llama=True, untied=True), "sgd", 3)

    def test_sgd_of_two_ranks_that_share_a_model(self):
        self.check(Shape(tp=2), "sgd", 3)

    def test_positions_that_begin_anew(self):
        self.check(Shape(), resets=True)

    def test_positions_that_begin_anew_on_two_ranks(self):
        self.check(Shape(tp=2), resets=True)

    def test_loss_scales(self):
        draw = random.Random(5)
        for initial, least, window, hysteresis, share in ((2.0**32, 1.0, 1000, 2, 1.0), (2.0**32, 1.0, 7, 2, 0.1),
                                                          (3.0, 0.7, 2, 1, 0.5), (65536.0, 64.0, 5, 4, 0.3)):
            overflows = [draw.random() < share for _ in range(3000)]
            theirs = DynamicGradScaler(initial_scale=initial, min_scale=least, growth_factor=2.0, backoff_factor=0.5,
                                       growth_interval=window, hysteresis=hysteresis)
            want = []
            for overflow in overflows:
                theirs.update(overflow)
                state = theirs.state_dict()
                want.append((state["scale"].item(), state["growth_tracker"], state["hysteresis_tracker"]))
            got = subprocess.run([TRACE, str(initial), str(least), str(window), str(hysteresis)], text=True, timeout=60,
                                 input="".join(str(int(x)) for x in overflows), capture_output=True, check=True).stdout
            got = [(float(a), int(b), int(c)) for a, b, c in (line.split() for line in got.splitlines())]
            n = next((i for i, w in enumerate(want) if w[0] > 1e38), len(want))  # where theirs may become infinite
            self.assertGreater(n, 100)
            self.assertEqual(got[:n], want[:n])


if __name__ == "__main__":
    unittest.main()
