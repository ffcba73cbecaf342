/* Any bytes as S3's XML: the parser ends, names the text it reports, and stays inside its bounds.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/s3/s3_xml.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int on_element(void *arg, const char *parent, const char *name, const char *text)
{
    size_t *n = arg;
    *n += strlen(parent) + strlen(name) + strlen(text);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t n = 0;
    struct mb_s3_xml_error e;
    struct mb_err err;
    mb_s3_xml_parse(data, size, on_element, &n, &err);
    if (mb_s3_xml_error_parse(data, size, &e) && e.code[0] == '\0')
        abort();
    return 0;
}
