/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_CACHE_COMMAND_H
#define KVF_CLI_CACHE_COMMAND_H

/* `kvferry cache`: saved sequences in a folder, listed, verified, removed. */

/** @return exit status */
int cli_cache_main(int argc, char **argv);

#endif
