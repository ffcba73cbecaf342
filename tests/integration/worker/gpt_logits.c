/* gpt_logits MODEL.safetensors TOKENS LOGITS [Megatron-LM's arguments]: forward of the CPU backend.
 * TOKENS is int32 [micro batch, seq], LOGITS becomes fp32 [micro batch, seq, padded vocabulary]. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include "base/alloc.h"
#include "worker/args_model.h"
#include "worker/checkpoint/safetensors.h"

static struct mb_err err;

static void must(int ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "gpt_logits: %s: %s\n", what, err.text);
        exit(1);
    }
}

static void load(struct mb_device *dev, struct mb_gpt *m, struct mb_st_reader *r)
{
    size_t n;
    const struct mb_param *p = mb_gpt_params(m, &n);
    must(n == mb_st_n_tensors(r), "number of tensors");
    for (size_t i = 0; i < n; i++) {
        const struct mb_st_tensor *t = mb_st_find(r, p[i].name);
        float *values = mb_calloc(p[i].n, sizeof *values);
        must(t != NULL && t->end - t->begin == p[i].n * sizeof *values, p[i].name);
        must(mb_st_read(r, t, 0, values, p[i].n * sizeof *values, &err) == 0, p[i].name);
        dev->ops->copy_in(dev->ctx, dev->stream, mb_gpt_weights(m) + p[i].offset, values,
                          p[i].n * sizeof *values);
        mb_free(values);
    }
    mb_gpt_weights_changed(m);
}

int main(int argc, char **argv)
{
    struct mb_args a;
    struct mb_gpt_config c;
    struct mb_device dev;
    struct mb_gpt *m = NULL;
    struct mb_st_reader *r = NULL;
    must(argc > 4, "usage");
    must(mb_args_parse(&a, argc - 4, (const char *const *)argv + 4, &err) == 0, "arguments");
    must(mb_args_validate(&a, 0, 1, &err) == 0, "arguments");
    must(mb_st_open(argv[1], &r, &err) == 0, argv[1]);
    uint64_t vocab = mb_st_find(r, "embedding.word_embeddings.weight")->shape[0];
    a.padded_vocab_size = (int64_t)vocab;
    mb_args_model(&a, vocab, &c);
    must(mb_backend_open(MOBULA_CPU_BACKEND, 0, &dev, &err) == 0, "backend");
    must(mb_gpt_create(&dev, &c, (size_t)a.micro_batch_size, &m, &err) == 0, "model");
    load(&dev, m, r);

    const size_t n_tokens = (size_t)(a.micro_batch_size * a.seq_length), n = n_tokens * vocab;
    int32_t *tokens = mb_calloc(n_tokens, sizeof *tokens);
    float *logits = mb_calloc(n, sizeof *logits);
    void *on_device = NULL;
    FILE *in = fopen(argv[2], "rb");
    must(in != NULL && fread(tokens, sizeof *tokens, n_tokens, in) == n_tokens, argv[2]);
    must(dev.ops->alloc(dev.ctx, n * sizeof *logits, &on_device, &err) == 0, "logits");
    struct mb_gpt_batch batch = {.tokens = tokens, .labels = tokens};
    must(mb_gpt_logits(m, &batch, on_device, &err) == 0, "forward");
    dev.ops->copy_out(dev.ctx, dev.stream, logits, on_device, n * sizeof *logits);
    must(dev.ops->synchronize(dev.ctx, dev.stream, &err) == 0, "forward");
    FILE *out = fopen(argv[3], "wb");
    must(out != NULL && fwrite(logits, sizeof *logits, n, out) == n && fclose(out) == 0, argv[3]);
    fclose(in);
    mb_free(tokens);
    mb_free(logits);
    mb_gpt_destroy(m);
    mb_backend_close(&dev);
    mb_st_close(r);
    mb_args_close(&a);
    return 0;
}
