/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_COMMANDS_H
#define KVF_CLI_BENCH_COMMANDS_H

/*
 * The commands of `kvferry bench`. @return exit status
 */

int cli_bench_link_main(int argc, char **argv);
int cli_bench_disk_main(int argc, char **argv);
int cli_bench_decode_main(int argc, char **argv);

#endif
