/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Names and texts of statuses, and the version. Both come from the one list in the public header.
 */

#include <kvferry/kvferry.h>

#define TEXT_OF(x)                        #x
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

const char *kvf_status_name(kvf_status status)
{
    switch (status) {
#define STATUS_NAME(name, value, text)                                                             \
    case name:                                                                                     \
        return #name;
        KVF_STATUS_LIST(STATUS_NAME)
#undef STATUS_NAME
    }
    return "unknown";
}

const char *kvf_status_text(kvf_status status)
{
    switch (status) {
#define STATUS_TEXT(name, value, text)                                                             \
    case name:                                                                                     \
        return text;
        KVF_STATUS_LIST(STATUS_TEXT)
#undef STATUS_TEXT
    }
    return "not a status of this library";
}

const char *kvf_version(void)
{
    return VERSION_TEXT(KVF_VERSION_MAJOR, KVF_VERSION_MINOR, KVF_VERSION_PATCH);
}
