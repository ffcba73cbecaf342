/* One JSON object, written atomically; readers ignore fields they do not know. */
#include "agent/node_file.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"

int mb_node_file_write(const char *node_dir, const struct mb_node_file *f, struct mb_err *err)
{
    json_t *o = json_pack(
        "{s:s, s:s, s:i, s:I, s:I, s:I, s:s, s:s, s:s, s:s, s:i, s:i, s:b, s:b, s:s, s:b, s:i, "
        "s:i}",
        "state", f->state, "error", f->error, "code", f->code, "pid_init", (json_int_t)f->pid_init,
        "start_ticks", (json_int_t)f->init_start_ticks, "pid_agent", (json_int_t)f->pid_agent,
        "node_id", f->node_id, "node_name", f->node_name, "node_ip", f->node_ip, "gcs_address",
        f->gcs_address, "grpc_port", f->grpc_port, "http_port", f->http_port, "is_head", f->is_head,
        "is_open", f->is_open, "token_path", f->token_path, "token_is_new", f->token_is_new,
        "dashboard_port", f->head_http_port, "metrics_port", f->metrics_port);
    char *text = o != NULL ? json_dumps(o, JSON_INDENT(1)) : NULL;
    char *path = mb_path_join(node_dir, "node.json");
    int rc = MB_ENOMEM;

    if (text != NULL && path != NULL)
        rc = mb_fs_replace(path, text, strlen(text), 0644, err);
    else
        mb_err_set(err, rc, "no memory for node.json");
    mb_free(path);
    mb_free(text);
    json_decref(o);
    return rc;
}

enum { NODE_FILE_MAX = 1 << 16 };

void mb_node_file_former_ports(const char *node_dir, struct mb_node_ports *out)
{
    char *path = mb_path_join(node_dir, "node.json");
    struct mb_buf text = {0};
    const char *state = NULL, *address = NULL, *colon;
    int is_head = 0, grpc_port = 0, http_port = 0, head_http_port = 0, metrics_port = 0;
    json_t *o = NULL;

    *out = (struct mb_node_ports){0};
    if (path != NULL && mb_fs_exists(path) && mb_fs_read(path, NODE_FILE_MAX, &text, NULL) == MB_OK)
        o = json_loads(mb_buf_str(&text), 0, NULL);
    if (json_unpack(o, "{s:s, s:s, s:b, s:i, s:i, s:i, s?i}", "state", &state, "gcs_address",
                    &address, "is_head", &is_head, "grpc_port", &grpc_port, "http_port", &http_port,
                    "dashboard_port", &head_http_port, "metrics_port", &metrics_port) == 0 &&
        strcmp(state, "ENDED") != 0) {
        colon = strrchr(address, ':');
        out->grpc_port = grpc_port;
        out->http_port = http_port;
        out->metrics_port = metrics_port;
        if (is_head && colon != NULL) {
            out->head_port = atoi(colon + 1);
            out->head_http_port = head_http_port;
        }
    }
    json_decref(o);
    mb_buf_close(&text);
    mb_free(path);
}
