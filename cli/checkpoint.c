/* mobula checkpoint: one file a verb, checkpoint_VERB.c. */
#include "cli/checkpoint.h"

static const struct mb_verb *const subverbs[] = {
    &mb_verb_checkpoint_push,    &mb_verb_checkpoint_pull,    &mb_verb_checkpoint_ls,
    &mb_verb_checkpoint_verify,  &mb_verb_checkpoint_diff,    &mb_verb_checkpoint_rm,
    &mb_verb_checkpoint_inspect, &mb_verb_checkpoint_convert, NULL,
};

const struct mb_verb mb_verb_checkpoint = {
    .name = "checkpoint",
    .summary = "look after checkpoints in a store; convert models",
    .synopsis = "push|pull|ls|verify|diff|rm|inspect|convert ...",
    .examples = "  mobula checkpoint push /ckpt/run1 s3://bucket/run1\n"
                "  mobula checkpoint pull s3://bucket/run1 /ckpt/run1\n"
                "  mobula checkpoint ls s3://bucket/run1\n"
                "  mobula checkpoint verify file:///ckpt/run1\n"
                "  mobula checkpoint convert ./Llama-3.1-8B /ckpt/base\n",
    .subverbs = subverbs,
};
