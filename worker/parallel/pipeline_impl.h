/* Between pipeline.c and pipeline_interleaved.c. Nobody else includes this. */
#ifndef MOBULA_WORKER_PARALLEL_PIPELINE_IMPL_H
#define MOBULA_WORKER_PARALLEL_PIPELINE_IMPL_H

#include "worker/parallel/pipeline.h"

/* Of interleaved stages: so many forward passes before the first backward pass but one. */
uint64_t mb_interleaved_ahead(struct mb_pipeline_place at);
/* The steps of the next pass of each direction; 0: there is none. */
int mb_interleaved_list(struct mb_pipeline *p);

#endif
