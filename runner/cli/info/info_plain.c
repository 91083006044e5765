/* SPDX-License-Identifier: Apache-2.0 */

/* What `kvferry info` prints in a build without the model runner, which has the reader of JSON: the
 * library's own description as it is. */

#include "info_report.h"

#include <stdio.h>

bool cli_info_print(const char *description, bool as_json)
{
    (void)as_json;
    return puts(description) >= 0;
}
