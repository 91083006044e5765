/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The PCIe link of a device, as sysfs tells it.
 *
 * Virtual machines often say "Unknown", or nothing; then the answer is 0 and nobody guesses.
 */

#include "pci_link.h"

#include <stdbool.h>
#include <stdio.h>

static bool read_line(const char *root, const char *pci_address, const char *name, char line[64])
{
    char path[512];
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s/%s", root, pci_address, name);
    FILE *file = fopen(path, "r");
    if (!file)
        return false;
    const bool is_read = fgets(line, 64, file) != NULL;
    fclose(file);
    return is_read;
}

void kvf_pci_link_read(const char *sysfs_root, const char *pci_address, uint32_t *generation,
                       uint32_t *width)
{
    static const double speeds[] = {2.5, 5.0, 8.0, 16.0, 32.0, 64.0, 128.0}; /* GT/s */
    const char *root = sysfs_root ? sysfs_root : "/sys";
    char line[64];
    double speed = 0.0;
    unsigned lanes = 0;
    *generation = *width = 0;
    if (read_line(root, pci_address, "max_link_speed", line) && sscanf(line, "%lf", &speed) == 1)
        for (uint32_t i = 0; i < sizeof speeds / sizeof *speeds; i++)
            if (speed >= speeds[i])
                *generation = i + 1;
    if (read_line(root, pci_address, "max_link_width", line) && sscanf(line, "%u", &lanes) == 1 &&
        lanes <= 32)
        *width = lanes;
}
