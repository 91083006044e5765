/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_COMMANDS_H
#define KVF_CLI_COMMANDS_H

/*
 * The commands, in the order of the help. `cli_<name>_main` is in the room of that name, or in
 * that of the command that it is a form of; it returns the exit status. And the calibration that
 * they share.
 */

#include <kvferry/kvferry.h>

#define CLI_COMMAND_LIST(X)                                                                        \
    X(run, "read a prompt, generate tokens, with the KV cache in host memory")                     \
    X(score, "how well a model predicts a text, with the KV cache in host memory")                 \
    X(tune, "how to prune a model's prompts, and which heads are hot")                             \
    X(bench, "link: how fast scattered pages reach the device; disk: extents of a file;\n"         \
             "           decode: one decode step")                                                 \
    X(plan, "--vllm: how many requests of how many tokens fit a card and host memory")             \
    X(cache, "saved sequences of a folder: list, verify, remove")                                  \
    X(info, "what this machine and this build have and lack")

#define CLI_COMMAND_MAIN(name, meaning) int cli_##name##_main(int argc, char **argv);
CLI_COMMAND_LIST(CLI_COMMAND_MAIN)
#undef CLI_COMMAND_MAIN

/*
 * Where the command keeps what calibration measured. The library reads no environment, so this
 * does.
 */

#define CLI_CALIBRATION_BYTES 1024u

/** Set config->calibration_path: as it was given, NULL for "-", by default kvferry/links in the
 * user's cache folder, which is made if it is not there. @p path [CLI_CALIBRATION_BYTES] holds the
 * default as long as the configuration is used. */
void cli_calibration_choose(kvf_runtime_config *config, char *path);

#endif
