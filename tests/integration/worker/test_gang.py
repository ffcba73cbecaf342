"""A gang of ranks trains, saves, resumes bit for bit, stops when asked, and fails loudly. Usage: test_gang.py WORKER"""

import json
import math
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
import unittest

from gang import MOCK, MODEL, Gang, content, iterations, run
from index_file import write_tokens

WORKER = os.path.abspath(sys.argv.pop(1))


def validations(rank):
    return re.findall(r"^ validation loss at .*$", rank.log(), re.M)


def spoil_token(path, token):
    """Makes a number of its embedding NaN; the file has no checksums any more."""
    with open(path, "rb") as f:
        content_before = f.read().replace(b'"mobula.crc64nvme.', b'"spoilt.crc64nvme.')
    n = struct.unpack_from("<Q", content_before)[0]
    tensor = json.loads(content_before[8:8 + n])["embedding.word_embeddings.weight"]
    spoilt = bytearray(content_before)
    struct.pack_into("<f", spoilt, 8 + n + tensor["data_offsets"][0] + 4 * tensor["shape"][1] * token, math.nan)
    with open(path, "wb") as f:
        f.write(spoilt)


class GangTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="mobula-gang-")
        self.addCleanup(self.folder.cleanup)

    def path(self, *parts):
        return os.path.join(self.folder.name, *parts)

    def train(self, world, name, *extra, iters=20):
        return run(WORKER, world, [*MODEL, *MOCK, "--train-iters", str(iters), *extra], self.path(name))

    def test_resume_is_bit_for_bit(self):
        for extra in ([], ["--use-distributed-optimizer"]):
            save = ["--save-interval", "10", *extra]
            tag = str(len(extra))
            whole = self.train(2, "whole" + tag, "--save", self.path("w" + tag), *save)
            first = self.train(2, "first" + tag, "--save", self.path("r" + tag), "--exit-interval", "10", *save)
            rest = self.train(2, "rest" + tag, "--save", self.path("r" + tag), "--load", self.path("r" + tag), *save)
            self.assertIn("[exiting program at iteration 10]", first.ranks[0].log())
            logged = iterations(whole.ranks[1])
            self.assertEqual(sorted(logged), list(range(1, 21)))
            self.assertEqual(logged, {**iterations(first.ranks[1]), **iterations(rest.ranks[1])})
            a, b = content(self.path("w" + tag, "iter_0000020")), content(self.path("r" + tag, "iter_0000020"))
            self.assertEqual(sorted(a), ["model_tp00_pp00.safetensors", "optim_dp_000_of_002.safetensors",
                                         "optim_dp_001_of_002.safetensors", "state.json"])
            for name in a:
                if name.endswith(".safetensors"):
                    self.assertEqual(a[name], b[name], name)
        # The sharded optimizer computes the same bits as the plain one.
        a, b = content(self.path("w0", "iter_0000020")), content(self.path("w1", "iter_0000020"))
        for name in a:
            if name.endswith(".safetensors"):
                self.assertEqual(a[name], b[name], name)

    def test_gradients_reduced_meanwhile_are_the_same(self):
        """In buckets while the backward pass runs, or all of them after it."""
        keep = ["--save-interval", "10"]
        self.train(2, "after", "--save", self.path("s"), *keep, iters=10)
        want = content(self.path("s", "iter_0000010"))
        for i, extra in enumerate(([], ["--ddp-bucket-size", "20000"],
                                   ["--ddp-bucket-size", "20000", "--use-distributed-optimizer"],
                                   ["--ddp-bucket-size", "1", "--use-distributed-optimizer", "--overlap-param-gather"])):
            self.train(2, f"m{i}", "--save", self.path(f"s{i}"), "--overlap-grad-reduce", *extra, *keep, iters=10)
            got = content(self.path(f"s{i}", "iter_0000010"))
            for name in want:
                if name.endswith(".safetensors"):
                    self.assertEqual(got[name], want[name], (extra, name))

    def test_runs_repeat_and_learn(self):
        a, b = self.train(2, "a"), self.train(2, "b")
        self.assertEqual(iterations(a.ranks[1]), iterations(b.ranks[1]))
        losses = [m["loss"] for m in a.ranks[0].of("progress")]
        self.assertLess(abs(losses[0] - math.log(128)), 0.3)
        self.assertLess(losses[-1], losses[0] - 0.3)
        self.assertEqual(a.ranks[0].of("done")[0]["iteration"], 20)
        self.assertIn("validation loss at iteration 20 on test set", a.ranks[1].log())
        # Megatron-LM's order: the arguments, known before the tokenizer, come first.
        told = ["using world size: 2,", "- arguments -", "  padded_vocab_size ............................... None",
                "- end of arguments -", "setting number of microbatches to constant 2",
                "> building NullTokenizer tokenizer ...", " > padded vocab (size: 101)",
                "> initializing torch distributed ..."]
        log = a.ranks[0].log()
        self.assertEqual(log.find(told[0]), 0)
        at = [log.find(text) for text in told]
        self.assertEqual(at, sorted(at))
        self.assertNotIn(-1, at)

    def test_other_numbers_of_ranks_go_on(self):
        save = ["--save-interval", "10", "--use-distributed-optimizer"]
        first = self.train(3, "three", "--save", self.path("s"), "--exit-interval", "10", "--global-batch-size", "6",
                           *save)
        for world in (1, 2):
            rest = self.train(world, f"w{world}", "--load", self.path("s"), "--global-batch-size", "6" if world == 1
                              else "12", *(["--override-opt_param-scheduler"] if world == 2 else []))
            self.assertEqual(min(iterations(rest.ranks[-1])), 11)
        self.assertEqual(max(iterations(first.ranks[-1])), 10)

    def test_an_evaluation_at_the_start_changes_nothing_else(self):
        for extra in ([], ["--dataloader-type", "cyclic"]):
            tag = str(len(extra))
            save = ["--save-interval", "10", *extra]
            plain = self.train(2, "plain" + tag, "--save", self.path("p" + tag), *save)
            shown = self.train(2, "shown" + tag, "--save", self.path("e" + tag), "--eval-at-start", *save)
            self.assertEqual(iterations(plain.ranks[1]), iterations(shown.ranks[1]))
            losses, start = validations(plain.ranks[1]), " validation loss at iteration 0 | lm loss value: "
            self.assertEqual(validations(shown.ranks[1])[1:], losses)
            self.assertTrue(validations(shown.ranks[1])[0].startswith(start))
            self.assertNotIn("validation loss at iteration 0", plain.ranks[1].log())
            a, b = content(self.path("p" + tag, "iter_0000020")), content(self.path("e" + tag, "iter_0000020"))
            for name in a:
                if name.endswith(".safetensors"):
                    self.assertEqual(a[name], b[name], name)
            a, b = json.loads(a["state.json"]), json.loads(b["state.json"])
            self.assertEqual(a["consumed_valid_samples"], b["consumed_valid_samples"])
        rest = self.train(2, "rest", "--load", self.path("e0"), "--eval-at-start", "--override-opt_param-scheduler",
                          iters=21)
        self.assertEqual([v.split(" | ")[0] for v in validations(rest.ranks[1])],
                         [f" validation loss at iteration {i}" for i in ("20", "21 on validation set", "21 on test set")])

    def test_reports_of_a_save(self):
        gang = self.train(2, "run", "--save", self.path("s"), "--save-interval", "15")
        for rank in gang.ranks:
            self.assertEqual([m["iteration"] for m in rank.of("saved")], [15, 20])
            for message in rank.of("saved"):
                for f in message["files"]:
                    size = os.path.getsize(os.path.join(message["text"], f["path"]))
                    self.assertEqual(size, f["size"])
        names = [f["path"] for r in gang.ranks for f in r.of("saved")[0]["files"]]
        self.assertEqual(sorted(names), sorted(os.listdir(self.path("s", "iter_0000015"))))
        with open(self.path("s", "latest_checkpointed_iteration.txt"), encoding="ascii") as f:
            self.assertEqual(f.read(), "20")

    def endless(self, *extra):
        args = [*MODEL, *MOCK, "--train-iters", "20000", "--eval-interval", "20000", *extra]
        gang = Gang(WORKER, 2, args, self.path("run"))
        self.addCleanup(gang.kill)
        gang.start().reached(3)
        return gang

    def test_sigterm_saves_and_exits(self):
        gang = self.endless("--save", self.path("s"), "--save-interval", "100000000")
        gang.ranks[1].process.send_signal(signal.SIGTERM)
        self.assertEqual(gang.finish(), [0, 0])
        done = gang.ranks[0].of("done")[0]["iteration"]
        self.assertEqual([m["iteration"] for r in gang.ranks for m in r.of("saved")], [done, done])
        self.assertIn("[exiting program after receiving SIGTERM.] datetime: ", gang.ranks[0].log())

    def test_stop_and_save_now_of_the_agent(self):
        gang = self.endless("--save", self.path("s"), "--save-interval", "100000000")
        gang.ranks[0].tell(t="save_now", text="a deadline")
        gang.wait(lambda: all(r.of("saved") for r in gang.ranks))
        at = gang.ranks[0].of("saved")[0]["iteration"]
        gang.ranks[1].tell(t="durable", iteration=at)
        gang.reached(at + 2)
        gang.ranks[0].tell(t="stop", text="the user")
        self.assertEqual(gang.finish(), [0, 0])
        self.assertEqual(len(gang.ranks[1].of("saved")), 2)

    def test_an_agent_that_is_gone_ends_the_run(self):
        gang = self.endless("--save", self.path("s"), "--save-interval", "100000000")
        gang.ranks[0].socket.close()
        gang.open.remove(gang.ranks[0])
        self.assertEqual(gang.finish(), [0, 0])

    def test_a_killed_rank_ends_the_others(self):
        for victim in (0, 1):
            gang = self.endless()
            gang.ranks[victim].process.send_signal(signal.SIGKILL)
            killed = time.monotonic()
            codes = gang.finish()
            self.assertLess(time.monotonic() - killed, 2)
            self.assertEqual(codes[victim], -signal.SIGKILL)
            other = gang.ranks[1 - victim]
            self.assertEqual(codes[1 - victim], 69)
            text = other.of("failed")[0]["text"]
            self.assertRegex(text, rf"rank {victim} went away")
            self.assertIn(text, other.log())

    def test_killed_while_saving_it_resumes(self):
        """Whenever the gang is killed, the tracker names a whole checkpoint, and never an older one."""
        args = [*MODEL, *MOCK, "--train-iters", "20000", "--eval-interval", "20000", "--save", self.path("s"),
                "--save-interval", "1", "--load", self.path("s")]
        rng = random.Random(20261121)
        saved = 0
        for attempt in range(6):
            gang = Gang(WORKER, 2, args, self.path(f"run{attempt}"))
            self.addCleanup(gang.kill)
            gang.start().reached(saved + 2)
            time.sleep(rng.uniform(0, 0.05))  # the moment of the kill is the subject of this test
            gang.kill()
            if saved:
                found = int(re.search(r"successfully loaded checkpoint from \S+ .* at iteration (\d+)",
                                      gang.ranks[0].log()).group(1))
                self.assertEqual(found, saved)
            with open(self.path("s", "latest_checkpointed_iteration.txt"), encoding="ascii") as f:
                saved = int(f.read())
        run(WORKER, 1, [*args, "--exit-interval", "1"], self.path("last"))

    def test_before_the_start_a_stop_is_an_end(self):
        gang = Gang(WORKER, 2, [*MODEL, *MOCK, "--train-iters", "20"], self.path("run"))
        self.addCleanup(gang.kill)
        gang.wait(lambda: all(r.of("endpoint") for r in gang.ranks))
        gang.ranks[0].tell(t="stop", text="the user")
        gang.ranks[1].process.send_signal(signal.SIGTERM)
        self.assertEqual(gang.finish(), [130, -signal.SIGTERM])

    def test_a_damaged_checkpoint_is_named_by_all(self):
        self.train(2, "a", "--save", self.path("s"), "--save-interval", "10", "--exit-interval", "10")
        shard = self.path("s", "iter_0000010", "optim_dp_001_of_002.safetensors")
        os.truncate(shard, os.path.getsize(shard) // 2)
        gang = Gang(WORKER, 2, [*MODEL, *MOCK, "--train-iters", "20", "--load", self.path("s")], self.path("b"))
        self.addCleanup(gang.kill)
        self.assertEqual(gang.start().finish(), [65, 65])
        for rank in gang.ranks:
            self.assertIn("optim_dp_001_of_002.safetensors", rank.of("failed")[0]["text"])

    def fails_with_one_line(self, world, name, *args, **more):
        """The line that all ranks report and one of them prints."""
        gang = Gang(WORKER, world, [*MODEL, *args], self.path(name), **more)
        self.addCleanup(gang.kill)
        self.assertEqual(gang.start().finish(), [65] * world)
        (line,) = {rank.of("failed")[0]["text"] for rank in gang.ranks}
        told = [re.findall(r"^mobula-worker: (.*)$", rank.log(), re.M) for rank in gang.ranks]
        self.assertEqual(told, [[line]] + [[]] * (world - 1))
        return line

    def test_a_loss_that_is_no_number_is_the_lowest_ranks(self):
        """Of a pipeline only the last stage has a loss."""
        for world, split, lowest in ((1, [], 0), (4, [], 0), (2, ["--pipeline-model-parallel-size", "2"], 1),
                                     (4, ["--pipeline-model-parallel-size", "2"], 2)):
            with self.subTest(world=world, split=split):
                line = self.fails_with_one_line(world, f"all{world}{len(split)}", *MOCK, "--train-iters", "20", "--lr", "1e38",
                                                "--clip-grad", "0", *split)
                self.assertRegex(line, rf"^rank {lowest}: iteration \d: the loss is not finite; lower --lr, or see "
                                       "--no-check-for-nan-in-loss-and-grad$")

    def test_a_norm_that_is_no_number_is_a_groups(self):
        """A loss of such a scale has gradients of no size."""
        for world, split, of in ((1, [], ""), (3, ["--global-batch-size", "6"], r" \(a sum over 3 data parallel ranks\)")):
            with self.subTest(world=world):
                line = self.fails_with_one_line(world, f"norm{world}", *MOCK, "--train-iters", "4", "--fp16", "--loss-scale", "1e38",
                                                *split)
                self.assertRegex(line, f"^rank 0: iteration 1: the norm of the gradient is not finite{of}; lower --lr or --loss-")

    def test_one_node_s_bad_data_are_found_on_its_rank(self):
        """The weights of one token are no number; one rank's file, as long as the others', has that token."""
        words = ["--untie-embeddings-and-output-weights", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
        run(WORKER, 1, [*MODEL, *words, "--mock-data", "--train-iters", "3", "--save", self.path("s"), "--save-interval", "3"],
            self.path("first"))
        spoil_token(self.path("s", "iter_0000003", "model_tp00_pp00.safetensors"), 90)
        for rank in range(3):
            os.mkdir(self.path(f"node{rank}"))
            write_tokens(self.path(f"node{rank}", "data"), [90 if rank == 1 else 10] * 2000)
        line = self.fails_with_one_line(3, "second", *words, "--data-path", "data", "--split", "1,0,0", "--eval-iters", "0",
                                        "--train-iters", "4", "--finetune", "--load", self.path("s"), "--global-batch-size", "6",
                                        home_of_rank=lambda rank: self.path(f"node{rank}"))
        self.assertRegex(line, "^rank 1: iteration 1: the loss is not finite; ")

    def test_samples_and_tokens_say_the_same(self):
        a = self.train(1, "a")
        b = run(WORKER, 1, [*MODEL, *MOCK, "--train-samples", "160", "--lr-warmup-iters", "0", "--lr-warmup-samples",
                            "16", "--calculate-per-token-loss"], self.path("b"))
        self.assertIn("setting training iterations to 20", b.ranks[0].log())
        self.assertEqual(iterations(a.ranks[0]), iterations(b.ranks[0]))

    def test_time_is_up(self):
        gang = self.train(2, "a", "--exit-duration-in-mins", "0", "--save", self.path("s"), "--save-interval", "100")
        self.assertIn("[exiting program after 0 minutes] datetime: ", gang.ranks[0].log())
        self.assertEqual(gang.ranks[1].of("saved")[0]["iteration"], 1)

    def test_weights_without_the_optimizer(self):
        save = ["--save", self.path("s"), "--save-interval", "10"]
        self.train(1, "a", "--exit-interval", "10", "--no-save-optim", *save)
        self.assertEqual(sorted(os.listdir(self.path("s", "iter_0000010"))),
                         ["model_tp00_pp00.safetensors", "state.json"])
        gang = Gang(WORKER, 1, [*MODEL, *MOCK, "--train-iters", "20", "--load", self.path("s")], self.path("b"))
        self.addCleanup(gang.kill)
        self.assertEqual(gang.start().finish(), [66])
        self.assertIn("Unable to load optimizer from checkpoint", gang.ranks[0].of("failed")[0]["text"])
        rest = self.train(1, "c", "--load", self.path("s"), "--no-load-optim")
        self.assertEqual(min(iterations(rest.ranks[0])), 11)
        tuned = self.train(2, "d", "--load", self.path("s"), "--finetune")
        self.assertEqual(min(iterations(tuned.ranks[1])), 1)
        losses = [m["loss"] for m in tuned.ranks[0].of("progress")]
        self.assertLess(losses[0], math.log(128) - 0.2)

    def test_strict_schedule(self):
        self.train(1, "a", "--save", self.path("s"), "--save-interval", "10", "--exit-interval", "10")
        for i, other in enumerate((["--train-iters", "30"], ["--weight-decay", "0.1"],
                                   ["--weight-decay-incr-style", "linear", "--start-weight-decay", "0.01",
                                    "--end-weight-decay", "0.01"])):
            gang = Gang(WORKER, 1, [*MODEL, *MOCK, "--train-iters", "20", "--load", self.path("s"), *other],
                        self.path(f"b{i}"))
            self.addCleanup(gang.kill)
            self.assertEqual(gang.start().finish(), [64])
            self.assertIn("--override-opt_param-scheduler", gang.ranks[0].of("failed")[0]["text"])

    def test_state_is_json_with_the_arguments(self):
        self.train(1, "a", "--save", self.path("s"), "--save-interval", "20")
        with open(self.path("s", "iter_0000020", "state.json"), encoding="utf-8") as f:
            state = json.load(f)
        self.assertEqual(state["args"]["hidden_size"], 64)
        self.assertEqual(state["consumed_train_samples"], 160)
        # Evaluations at 5, 10, 15, 20; the last save comes before the final one.
        self.assertEqual(state["consumed_valid_samples"], 4 * 2 * 8)


if __name__ == "__main__":
    unittest.main(verbosity=2)
