/*
 * Pullers that share a directory, on one node or on several. Blocking, for the pool. All of it is
 * best effort: where a file system has no locks (flock), pullers fetch the same file twice, and
 * what a killed one left stays until the next pull on a file system that has them.
 */
#ifndef MOBULA_AGENT_UPLOAD_PULL_LOCK_H
#define MOBULA_AGENT_UPLOAD_PULL_LOCK_H

#define MB_PULL_TEMP ".pull-"       /* PATH.pull-NUMBER, and what the store adds */
#define MB_PULL_LOCK ".mobula-lock" /* PATH.mobula-lock */

/* 1: this file, by its path below the directory, is the checkpoint's own, whatever its name. */
typedef int (*mb_pull_keeps)(void *arg, const char *path);

/* The directory of an iteration, which is made. Who comes alone removes the temporary files and
 * locks of pullers that are dead; keeps: NULL, all of them. Returns a descriptor for
 * mb_pull_leave(), or -1. */
int mb_pull_enter(const char *dir, mb_pull_keeps keeps, void *arg);
/* All files are there: the same, if the others have left, or died, meanwhile. */
void mb_pull_tidy(const char *dir, int fd, mb_pull_keeps keeps, void *arg);
/* The last one to leave takes the lock's file away. -1 is legal. */
void mb_pull_leave(const char *dir, int fd);

/* 1: a puller is at work in this directory, as far as locks tell. */
int mb_pull_is_entered(const char *dir);

enum mb_pull_turn {
    MB_PULL_OURS, /* *fd is for mb_pull_file_done() */
    MB_PULL_WAIT, /* another one fetches this file: look again soon */
    MB_PULL_NO_LOCK
};
enum mb_pull_turn mb_pull_file_turn(const char *path, int *fd);
void mb_pull_file_done(const char *path, int fd); /* -1 is legal */

/* A temporary file of ours: path, and what the store made of it. */
void mb_pull_remove_temp(const char *path);

/* Pure: 1 if this is the name of a temporary file of a puller. */
int mb_pull_is_temp(const char *name);

#endif
