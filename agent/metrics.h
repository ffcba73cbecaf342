/* Text in Prometheus' exposition format 0.0.4. Pure: numbers in, text out. */
#ifndef MOBULA_AGENT_METRICS_H
#define MOBULA_AGENT_METRICS_H

#include <stdint.h>
#include "base/buf.h"

enum mb_metric_type { MB_METRIC_GAUGE, MB_METRIC_COUNTER };

/* A family's head: HELP and TYPE lines. Samples follow until the next family. */
int mb_metric_family(struct mb_buf *out, const char *name, enum mb_metric_type type,
                     const char *help);
/* One sample; labels are key, value pairs, NULL-terminated (NULL: none). Values are escaped. */
int mb_metric_sample(struct mb_buf *out, const char *name, const char *const *labels, double value);

#endif
