/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_PCI_LINK_H
#define KVF_OFFLOAD_PCI_LINK_H

/*
 * The PCIe link of a device, as sysfs tells it. Knows nothing of what the device is.
 */

#include <stdint.h>

/*
 * Generation (1 to 7) and lanes of the link at "dddd:bb:dd.f", the most that the device can do: the
 * current speed falls when a GPU idles. 0 = unknown. `sysfs_root` replaces "/sys" if it is not
 * NULL.
 */
void kvf_pci_link_read(const char *sysfs_root, const char *pci_address, uint32_t *generation,
                       uint32_t *width);

#endif
