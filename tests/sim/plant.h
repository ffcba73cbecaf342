/*
 * Bugs that can be planted in the simulated shells, one at a time. Each is a mistake that a shell
 * could make; some seed must notice. A simulation that cannot see a planted bug proves nothing.
 */
#ifndef MOBULA_TESTS_SIM_PLANT_H
#define MOBULA_TESTS_SIM_PLANT_H

#define SIM_PLANTS(X)                                                                              \
    X(ACK_BEFORE_COMMIT, "the head answers a submission before its record is committed")           \
    X(RERUN_AFTER_RESTART, "a restarted head starts every job that had not ended")                 \
    X(TERMINAL_OVERWRITTEN, "a stop replaces the state of a job that has ended")                   \
    X(STOP_FORGOTTEN, "a restarted head has forgotten that a stop was asked for")                  \
    X(STOPPED_BEFORE_ITS_DRIVER, "a stopped job is over while its driver is being started")        \
    X(LINE_LOST, "a restarted head does not put jobs that waited in line again")                   \
    X(LINE_ANEW, "a restarted head puts jobs in line in another order")                            \
    X(RUNNING_NOT_COUNTED, "a restarted head does not count the drivers that run")                 \
    X(PLACE_LEFT_EARLY, "the place of a job is given back when its stop is asked for")             \
    X(START_BEFORE_COMMIT, "a job has its turn before its record is committed")                    \
    X(STATUS_BEFORE_COMMIT, "a state is shown before it is committed")                             \
    X(END_BEFORE_COMMIT, "the commit of an older state of a job counts as that of its end")        \
    X(WAIT_TOO_EARLY, "a driver hears of its group before that is committed")                      \
    X(RETURN_TAKEN_FOR_DONE, "a Return that failed counts as done")                                \
    X(RECONCILE_SKIPPED, "a restarted head does not tell nodes which bundles are in use")          \
    X(REGISTERED_IS_CLEAN, "a node that registers again is taken to hold no bundle")               \
    X(DEAD_COMES_BACK, "a dead node id that registers again is accepted")                          \
    X(HUNG_IS_ALIVE, "a question to a node that is not answered counts as answered")               \
    X(SECOND_UNHEARD, "what the second channel of a node says is not heard")                       \
    X(REPLY_BEFORE_LEDGER, "an agent answers before its ledger is on disk")                        \
    X(LEDGER_IN_PLACE, "a ledger is written over the one before it")                               \
    X(LEDGER_NOT_SYNCED, "a ledger is renamed before it is on the disk")                           \
    X(FENCE_FORGOTTEN, "which attempt is the newest is not on disk before Hello is answered")      \
    X(FREED_TOO_EARLY, "devices are given back when ranks were asked to stop")                     \
    X(NOT_ADOPTED, "a restarted agent does not look for the ranks it had started")                 \
    X(ENDED_IS_LOST, "a driver whose last word from a node was lost takes the node for lost")      \
    X(LAUNCH_ONCE, "a driver does not repeat a Launch that never arrived")                         \
    X(OLD_PREPARE_KEPT, "a bundle that a former head prepared is kept for ever")                   \
    X(COMMIT_OF_ANOTHER, "Commit books a bundle that was not prepared")                            \
    X(FENCE_BY_GROUP, "an agent counts attempts by their group, not by the gang's first")          \
    X(BATCH_DOES_NOT_DIVIDE, "a driver takes any number of nodes that is there")                   \
    X(FOLLOWS_THE_BUNDLE, "a driver launches an attempt again where a lost node's bundle now is")  \
    X(ENDED_WHEN_ASKED, "a driver takes ranks for ended when it has asked them to end")            \
    X(LEASE_ASKS_THE_HEAD, "ranks whose driver is silent stay as long as their job runs")          \
    X(LAUNCH_BESIDE, "an attempt is launched beside what is left of the one before it")            \
    X(HALT_HOLDS, "a node that had not launched waits for End after it was told to halt")          \
    X(OLD_MANIFEST, "parts of an older attempt go into a manifest")                                \
    X(CLAIM_TAKEN_BACK, "an older attempt takes an iteration back from a newer one")               \
    X(POINTER_BACKWARDS, "the latest pointer is written without a look at it")                     \
    X(SAVE_NOT_NOTED, "a save is not written to the journal")                                      \
    X(PART_OF_A_SAVE, "a save that some rank did not live to finish is waited for")                \
    X(DONE_BEFORE_SENT, "a file counts as sent when its transfer begins")                          \
    X(SUCCESS_TOO_EARLY, "the driver does not wait until what was saved is durable")               \
    X(GIVEN_UP_IS_DURABLE, "a driver takes a save that is given up for a durable one")             \
    X(LOG_OFFSET_RESET, "an agent numbers the bytes of a log anew, one too low")                   \
    X(FOLLOW_RESTARTS, "a follower that reconnects is sent the log from its start")                \
    X(CLOSED_TOO_EARLY, "a follower is let go before the last bytes of the log")

enum sim_plant {
    PLANT_NONE,
#define X(name, text) PLANT_##name,
    SIM_PLANTS(X)
#undef X
        N_PLANTS
};

extern const char *const sim_plant_names[N_PLANTS];
extern const char *const sim_plant_texts[N_PLANTS];

#endif
