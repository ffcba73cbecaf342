"""Against the real megatron-core: a run goes on in ours from --ckpt-format torch_dist and from the distributed optimizer's files.
Usage: test_megatron_optim_dist.py WORKER MOBULA BAD_DISK"""

import dataclasses
import errno
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import unittest

import torch

import gang
from megatron_gang import Shape
from megatron_train import CLIP, MOBULA, SAMPLES, STEPS, WORKER, Case, LayoutCase, Rank, layout_main, name_of, start

BAD_DISK = os.path.abspath(sys.argv.pop(1))
LAYOUTS = (("tensors", 2, ["--tensor-model-parallel-size", 2]),
           ("stages", 2, ["--pipeline-model-parallel-size", 2, "--use-distributed-optimizer"]),
           ("data", 2, ["--use-distributed-optimizer"]))
FORMS = ("fully_reshardable", "dp_reshardable", "dp_zero_gather_scatter", "distrib_optim.pt")


def step_main(rank, s, folder):
    """Takes steps and saves, then one more."""
    r = Rank(rank, s, folder, "meet")
    for _ in range(STEPS):
        r.step()
    r.save("theirs", STEPS)
    told = r.step()
    r.save("after", STEPS + 1)
    if rank == 0:
        torch.save(told, r.folder / "told.pt")
    r.end()


class StepTest(Case):
    """The next step of ours is that of who stayed."""

    def check(self, s, layouts=()):
        self.make_data()
        start(step_main, s, str(self.path))
        told = torch.load(self.path / "told.pt")
        self.assertGreater(told[1], CLIP)
        save = ["--save", self.path / "ours", "--save-interval", 1, "--exit-interval", STEPS + 1]
        self.check_log(self.train("--load", self.path / "theirs", *save), told)
        want, _ = self.of_theirs("after", STEPS + 1)
        got, state = self.whole("ours", STEPS + 1)
        self.assertEqual((state["optimizer_steps"], state["schedule_samples"], state["warmup_samples"], state["decay_samples"]),
                         (STEPS + 1, (STEPS + 1) * SAMPLES, 2 * SAMPLES, 10 * SAMPLES))
        self.close(got, want)
        for name, world, more in layouts:
            with self.subTest(layout=name):
                gang.run(WORKER, world, self.words("--load", self.path / "theirs", *save[2:], "--save", self.path / name, *more),
                         str(self.path / f"cwd-{name}"))
                self.close(self.whole(name, STEPS + 1)[0], want)

    def test_whole_tensors(self):
        self.check(Shape(dist=True))

    def test_whole_tensors_of_two_ranks(self):
        self.check(Shape(tp=2, llama=True, untied=True, dist=True), LAYOUTS)

    def test_fully_reshardable(self):
        self.check(Shape(llama=True, untied=True, dp=2, zero="fully_reshardable", dist=True))

    def test_dp_reshardable(self):
        self.check(Shape(llama=True, untied=True, dp=2, zero="dp_reshardable", dist=True), LAYOUTS)

    def test_dp_zero_gather_scatter(self):
        self.check(Shape(dp=2, zero="dp_zero_gather_scatter", dist=True))

    def test_distrib_optim(self):
        self.check(Shape(llama=True, untied=True, dp=2, zero="distrib_optim.pt"), LAYOUTS)


class LayoutTest(LayoutCase):
    """Every layout and form of theirs, with gradients whose whole tensors torch's own Adam has, too."""

    def test_bf16(self):
        _, state = self.check(Shape(tp=2, llama=True, untied=True, dist=True), torch.bfloat16)
        self.assertNotIn("grad_scaler", state)

    def test_fp16(self):
        _, state = self.check(Shape(dist=True), torch.float16)
        self.assertEqual(state["grad_scaler"], {"scale": 128.0, "growth_tracker": 1, "hysteresis_tracker": 2})

    def test_interleaved_stages(self):
        self.check(Shape(pp=2, vp=2, llama=True, untied=True, dist=True))

    def forms(self, s, halves=None, forms=FORMS):
        for zero in forms:
            with self.subTest(zero):
                self.fresh()
                self.check(dataclasses.replace(s, zero=zero, dist=zero != "distrib_optim.pt"), halves)

    def test_buffers_of_two_by_two_with_tied_embeddings(self):
        """Biases of 48 elements a rank: there is something to be padded."""
        self.forms(Shape(tp=2, pp=2))

    def test_buffers_of_interleaved_stages_in_bf16(self):
        self.forms(Shape(pp=2, vp=2, dp=2, llama=True), torch.bfloat16)

    def test_buffers_of_several_buckets(self):
        s = Shape(tp=2, dp=2, bucket=20000, dist=True)
        self.forms(s, torch.bfloat16, FORMS[1:])
        # Megatron-LM cuts parameters out of buffers without padding as if it were there, and saves others than they are.
        self.fresh()
        start(layout_main, dataclasses.replace(s, zero=FORMS[0]), str(self.path), torch.bfloat16)
        done = subprocess.run([MOBULA, "checkpoint", "convert", self.path / "theirs", self.path / "ours"], capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, 65)
        self.assertIn("are not its weights: its buffers are laid out in another way than is known, or were saved from", done.stderr)

    def test_buffers_in_fp16(self):
        for zero in FORMS[1:]:
            with self.subTest(zero):
                self.fresh()
                _, state = self.check(Shape(zero=zero, dist=zero != "distrib_optim.pt"), torch.float16)
                self.assertEqual(state["grad_scaler"], {"scale": 128.0, "growth_tracker": 1, "hysteresis_tracker": 2})


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class BadInputTest(Case):
    """What does not fit is named before anything is trained or written, and without the optimizer it goes on."""

    def save(self, s):
        self.fresh()
        start(layout_main, s, str(self.path), torch.bfloat16)
        self.make_data()
        self.at = self.path / "theirs" / name_of(STEPS)
        shutil.copytree(self.at, self.path / "whole")

    def restore(self):
        shutil.rmtree(self.at)
        shutil.copytree(self.path / "whole", self.at)

    def tool(self, *words, env=None):
        return subprocess.run([MOBULA, "checkpoint", *map(str, words)], capture_output=True, text=True, check=False,
                              env={**os.environ, **(env or {})})

    def refused(self, text, status=65, env=None):
        """By all who want the optimizer, for the same reason: 78 of a form that is not read, which verify says it did not compare."""
        done = self.tool("convert", self.path / "theirs", self.path / "none", env=env)
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertIn(text, done.stderr)
        self.assertFalse((self.path / "none").exists())
        log = self.train("--load", self.path / "theirs", "--exit-interval", STEPS + 1, status=status, env=env)
        self.assertIn(text, log)
        self.assertNotIn("lm loss:", log)
        done = self.tool("verify", self.path / "theirs", env=env)
        self.assertEqual(done.returncode, 0 if status == 78 else status, done.stderr)
        self.assertIn(text, done.stderr)
        if status == 78:
            self.assertIn("warning: not compared: the optimizer, which is not read: ", done.stderr)
            self.assertIn(", not its optimizer\n", done.stdout)
            self.assertIn(text, json.loads(self.tool("verify", "--json", self.path / "theirs").stdout)["not_compared"])
        self.assertIn("lm loss:", self.train("--load", self.path / "theirs", "--exit-interval", STEPS + 1, "--no-load-optim", env=env))
        self.restore()

    def meta(self, change):
        file = self.at / ".metadata"
        meta = pickle.loads(file.read_bytes())
        change(meta)
        file.write_bytes(pickle.dumps(meta))

    def common(self, change):
        state = torch.load(self.at / "common.pt", weights_only=False)
        change(state)
        torch.save(state, self.at / "common.pt")

    def place(self, name):
        meta = pickle.loads((self.at / ".metadata").read_bytes())
        return next(v for k, v in meta.storage_data.items() if k.fqn == name)

    def flip(self, name):
        info = self.place(name)
        file = self.at / info.relative_path
        whole = bytearray(file.read_bytes())
        whole[info.offset + info.length // 2] ^= 1
        file.write_bytes(bytes(whole))

    def objects(self, name, value):
        """Another object in a file of its own."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        (self.at / "__9_9.distcp").write_bytes(buffer.getvalue())

        def change(meta):
            for key, info in meta.storage_data.items():
                if key.fqn == name:
                    info.relative_path, info.offset, info.length = "__9_9.distcp", 0, len(buffer.getvalue())
        self.meta(change)

    def test_whole_tensors(self):
        self.save(Shape(tp=2, llama=True, untied=True, dist=True))
        name = "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight"

        def of(meta, what=name):
            return meta.state_dict_metadata[what]

        def drop(meta, what=name):
            del meta.state_dict_metadata[what]

        def add(meta):
            meta.state_dict_metadata["optimizer.state.max_exp_avg_sq.x"] = of(meta)

        def widen(meta):
            of(meta).size = torch.Size([5, 192, 64])

        def turn(meta):
            of(meta).size = torch.Size([4, 64, 192])
            of(meta).chunks = [type(of(meta).chunks[0])(torch.Size([i, 0, 0]), torch.Size([1, 64, 192])) for i in range(4)]

        self.flip(name)
        self.refused(f"tensor {name}: a checksum is not that of its bytes")
        for change, text, status in (
                (drop, f"tensor {name[:27]}decoder.layers.0.mlp.linear_fc1.weight is missing", 65),
                (lambda m: drop(m, "optimizer.state.fp32_param.decoder.final_layernorm.weight"), "fp32_param.decoder.final_layernorm.weight is missing", 65),
                (add, "tensor optimizer.state.max_exp_avg_sq.x is none that is read of an optimizer", 78),
                (widen, f"tensor {name}: its chunks are not all of it", 65),
                (turn, f"tensor {name}: bytes of a chunk that it has not", 65),
                (lambda m: of(m).chunks.pop(), f"tensor {name}: bytes of a chunk that it has not", 65),
                (lambda m: setattr(of(m).properties, "dtype", torch.float64), f"tensor {name}: its numbers are neither", 78)):
            with self.subTest(text):
                self.meta(change)
                self.refused(text, status)
        for change, text, status in (
                (lambda o: o["optimizer"]["param_groups"][0].update(wd_mult=0.5), "param_groups 0: its wd_mult is neither", 78),
                (lambda o: o["optimizer"]["param_groups"][0].update(amsgrad=True), "amsgrad is not provided", 78),
                (lambda o: o["optimizer"].pop("param_groups"), "its optimizer has no param_groups", 65),
                (lambda o: o["optimizer"]["state"].clear(), "does not say how many steps", 65),
                (lambda o: o.update(param_state_sharding_type="fsdp_dtensor"),
                 "form fsdp_dtensor is not read; Megatron-LM saves one that is read with --dist-ckpt-optim-fully-reshardable", 78)):
            with self.subTest(text):
                self.common(lambda state, f=change: f(state["optimizer"]))
                self.refused(text, status)
        facts = json.loads(self.tool("inspect", "--json", self.path / "theirs").stdout)
        self.assertEqual((facts["optimizer_steps"], facts.get("optimizer_refused")), (STEPS, None))
        self.assertIn("torch_dist, optimizer of 3 steps", self.tool("inspect", self.path / "theirs").stdout)
        self.assertEqual(self.tool("verify", self.path / "theirs").returncode, 0)

    def test_buckets(self):
        self.save(Shape(tp=2, pp=2, llama=True, zero="dp_reshardable", dist=True))
        start_of = "optimizer.distributed.dp_group_idx_"
        bucket = f"{start_of}2.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"

        def forget(meta):
            del meta.state_dict_metadata[bucket]

        self.flip(bucket)
        self.refused(f"tensor {bucket}: a checksum is not that of its bytes")
        self.meta(forget)
        self.refused("bucket 0 of buffer 0 of the optimizer of tensor-parallel rank 0, stage 1 has no exp_avg")
        self.common(lambda state: setattr(state["args"], "tensor_model_parallel_size", 4))
        self.refused("there is no optimizer.distributed.dp_group_idx_4: by the arguments 8 ranks had a part of the model")
        self.common(lambda state: setattr(state["args"], "tensor_model_parallel_size", 1))
        self.refused("buffer 0 of the optimizer of tensor-parallel rank 0, stage 0 has")
        self.common(lambda state: setattr(state["args"], "decoder_first_pipeline_num_layers", 1))
        self.refused("stages of unlike many layers (decoder_first_pipeline_num_layers) and an optimizer in buffers", 78)
        self.common(lambda state: setattr(state["args"], "transformer_impl", "transformer_engine"))
        self.refused("are not its weights: its buffers are laid out in another way than is known")
        optimizer = f"{start_of}3.optimizer/shard_0_1"
        groups = [{"param_groups": [{"wd_mult": 1.0, "lr_mult": 1.0, "step": STEPS + 1}]}]
        self.objects(optimizer, groups)
        self.refused(f"param_groups says {STEPS + 1} steps of the optimizer, others say {STEPS}")
        self.objects(optimizer, [{"param_groups": []}])
        self.refused("its optimizer has no param_groups")
        self.objects(optimizer, Evil(self.path / "ran"))
        self.refused("it names posix.system, which no checkpoint of Megatron-LM has: it is refused", 78)
        self.assertFalse((self.path / "ran").exists())

    def test_buffers(self):
        self.save(Shape(tp=2, llama=True, zero="distrib_optim.pt"))
        file = self.at / "mp_rank_01" / "distrib_optim.pt"
        whole = bytearray(file.read_bytes())
        whole[len(whole) // 2] ^= 1
        file.write_bytes(bytes(whole))
        self.refused("mp_rank_01/distrib_optim.pt: distrib_optim/data/")
        file.write_bytes(bytes(whole[:-100]))
        self.refused("mp_rank_01/distrib_optim.pt: no whole zip file of torch.save")
        file.unlink()
        file.mkdir()
        self.refused("mp_rank_01/distrib_optim.pt: no whole zip file of torch.save: it is no file")
        for call, number, status in (("READ", errno.EIO, 74), ("READ", errno.ENOMEM, 70), ("OPEN", errno.EACCES, 77),
                                     ("OPEN", errno.EMFILE, 73)):
            with self.subTest(errno.errorcode[number]):
                bad = gang.bad_disk(BAD_DISK, "mp_rank_01/distrib_optim.pt", call, number)
                words = self.words("--load", self.path / "theirs", "--exit-interval", STEPS + 1)
                codes = gang.Gang(WORKER, 2, words, str(self.path / "two"), bad).start().finish()
                self.assertIn(status, codes)
                self.assertLessEqual(set(codes), {status, 69})  # of one that heard of the other's first
                self.refused(f"mp_rank_01/distrib_optim.pt: {os.strerror(number)}", status, bad)
        file.unlink()
        self.refused("does not say which parameters are its, and there is no distrib_optim.pt beside it", 66)
        kind = (torch.bfloat16, torch.float32)

        def turn_a_few(o):  # of a parameter, and not its first ones
            x = o[0][kind]["param"]
            at = x.numel() // 2 + 17
            x[at:at + 3] = 1 - x[at:at + 3]

        for change, text, status in (
                (lambda o: o[0][kind].pop("exp_avg_sq"), "tensor 0.0.exp_avg_sq is missing, or no list", 65),
                (lambda o: o[0][kind].update(param=o[0][kind]["param"][64:].clone()), "buffer 0 of the optimizer of tensor-parallel rank 1, stage 0 has", 65),
                (lambda o: o[0][kind].update(param=o[0][kind]["param"].roll(64)), "are not its weights", 65),
                (turn_a_few, "are not its weights", 65),
                (lambda o: o.update({1: {kind: o[0][kind]}}), "1.0.exp_avg is none that is read of an optimizer", 78)):
            with self.subTest(text):
                saved = torch.load(file, weights_only=False)
                change(saved)
                torch.save(saved, file)
                self.refused(text, status)


if __name__ == "__main__":
    unittest.main()
