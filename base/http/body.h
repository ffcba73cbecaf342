/*
 * The body of a request: bytes in memory, or a stretch of a file that is read or sent from where it
 * lies. Holes of a file are not read, which would fill the page cache with zeros. Any thread, one
 * at a time.
 */
#ifndef MOBULA_BASE_HTTP_BODY_H
#define MOBULA_BASE_HTTP_BODY_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct mb_http_body {
    uint8_t *bytes; /* with fd < 0 */
    int fd;         /* borrowed; -1: none */
    uint64_t offset;
    size_t len;
    size_t pos;
    uint64_t stretch; /* bytes from pos on that are all data of the file, or all hole */
    int is_hole;
    int is_copied; /* sendfile(2) cannot read this file */
};

void mb_http_body_seek(struct mb_http_body *b, size_t pos);
/* The next bytes, at most want; 0 at the end. MB_ESTATE: the file is shorter than len; MB_EIO. */
ssize_t mb_http_body_read(struct mb_http_body *b, void *out, size_t want);
/* From the file to the socket, which does not block: what it takes now, max_bytes about at most.
 * MB_OK, also when nothing could be sent; MB_ESTATE and MB_EIO as above; MB_EUNAVAIL: the socket
 * failed. SIGPIPE has to be ignored. */
int mb_http_body_send(struct mb_http_body *b, int socket, size_t max_bytes);

#endif
