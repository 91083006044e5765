/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_CALIBRATION_FILE_H
#define KVF_CLI_CALIBRATION_FILE_H

/*
 * Where the command keeps what calibration measured. The library reads no environment, so this
 * does.
 */

#include <kvferry/kvferry.h>

#define CLI_CALIBRATION_BYTES 1024u

/** Set config->calibration_path: as it was given, NULL for "-", by default kvferry/links in the
 * user's cache folder, which is made if it is not there. @p path [CLI_CALIBRATION_BYTES] holds the
 * default as long as the configuration is used. */
void cli_calibration_choose(kvf_runtime_config *config, char *path);

#endif
