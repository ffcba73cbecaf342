/*
 * A node of Ray's at this node's address.
 *
 * A program that calls ray.init of 2.40 takes the first node alive that has its machine's address,
 * whatever the row says else (GetNodeToConnectForDriver in Ray's
 * src/ray/gcs/gcs_client/global_state_accessor.cc); 2.60 looks for a raylet of the machine. Where
 * it is ours the program aborts. No field of a row but the address makes it go on to the next, so
 * people are told what helps.
 */
#ifndef MOBULA_AGENT_NEIGHBOUR_H
#define MOBULA_AGENT_NEIGHBOUR_H

#define MB_NODE_LABEL_VERSION "mobula.io/version" /* of our nodes; Ray's own have none */

struct mb_gcs;

/* Asks an older head, connected, for its nodes and warns of one of Ray's at this address. On the
 * loop's thread; ip is borrowed until gcs is closed. */
void mb_neighbour_look(struct mb_gcs *gcs, const char *ip);

#endif
