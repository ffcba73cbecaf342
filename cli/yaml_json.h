/*
 * A YAML document as JSON, as PyYAML's safe_load and json.dumps would make it, for what people
 * write by hand. Pure.
 *
 * Plain words are what YAML 1.1 says (yes is true, 0x10 is 16), but dates and base-60 numbers are
 * text, and keys are always text. Refused, with the line: aliases and merge keys (a few lines of
 * them can mean gigabytes), tags beyond YAML's own, keys that come twice, numbers that JSON lacks,
 * a second document, more than MB_YAML_DEPTH_MAX levels or MB_YAML_MAX_BYTES.
 */
#ifndef MOBULA_CLI_YAML_JSON_H
#define MOBULA_CLI_YAML_JSON_H

#include <jansson.h>
#include <stddef.h>
#include "base/err.h"

enum { MB_YAML_MAX_BYTES = 1 << 20, MB_YAML_DEPTH_MAX = 64 };

/* *out is the caller's; an empty document is null. 0, MB_EINVAL "line N: ...", MB_ENOMEM. */
int mb_yaml_json(const char *text, size_t n, json_t **out, struct mb_err *err);

#endif
