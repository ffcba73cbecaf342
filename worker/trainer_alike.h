/* Whether ranks have the same data, or anything else that must be the same. */
#ifndef MOBULA_WORKER_TRAINER_ALIKE_H
#define MOBULA_WORKER_TRAINER_ALIKE_H

#include "worker/data/loader.h"
#include "worker/trainer.h"

/* Of this rank's data; it reads each .idx. */
struct mb_data_facts {
    size_t n;       /* prefixes */
    int64_t *facts; /* of each the same number; owned */
};

int mb_data_facts_make(const struct mb_data_sources *s, struct mb_data_facts *out,
                       struct mb_err *err);
void mb_data_facts_close(struct mb_data_facts *f);

/* MB_EINVAL on all ranks names a rank and what is another there. Collective. */
int mb_trainer_compare_data(struct mb_trainer *t, const struct mb_data_sources *s,
                            const struct mb_data_facts *f, struct mb_err *err);
/* Whether all ranks say the same number. Collective. */
int mb_trainer_is_everybodys(struct mb_trainer *t, uint64_t number, int *out, struct mb_err *err);
/* It is not: MB_EINVAL on all ranks names one whose samples, of which that is a checksum, come in
 * another order. Collective. */
int mb_trainer_name_odd(struct mb_trainer *t, uint64_t digest, struct mb_err *err);

/* MB_EINVAL on all ranks: their tokenizers, each its node's files, have another size or end of a
 * document. Other tokens of the same number are not seen. Collective. */
int mb_trainer_compare_tokenizers(struct mb_trainer *t, struct mb_err *err);

#endif
