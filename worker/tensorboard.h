/*
 * TensorBoard's event files: one file a run, `events.out.tfevents.SECONDS.HOST.PID.0` in a
 * directory, of records u64 length, masked CRC32C of it, data, masked CRC32C of the data; data is
 * an Event (tensorflow/core/util/event.proto). Scalars are written in memory and reach the file
 * with mb_tensorboard_flush(), or when queue_size of them wait. One thread.
 */
#ifndef MOBULA_WORKER_TENSORBOARD_H
#define MOBULA_WORKER_TENSORBOARD_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

struct mb_tensorboard;

/* Makes the directory. queue_size: from 1 on. */
int mb_tensorboard_open(const char *dir, size_t queue_size, struct mb_tensorboard **out,
                        struct mb_err *err);
void mb_tensorboard_close(struct mb_tensorboard *t); /* NULL is legal; flushes */

/* What does not fit in memory, or on disk, is an error of the next flush. */
void mb_tensorboard_scalar(struct mb_tensorboard *t, const char *tag, int64_t step, double value);
/* As SummaryWriter.add_text does: tag "NAME/text_summary". */
void mb_tensorboard_text(struct mb_tensorboard *t, const char *name, int64_t step,
                         const char *text);
int mb_tensorboard_flush(struct mb_tensorboard *t, struct mb_err *err);

#endif
