/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_GNUPLOT_H
#define KVF_CLI_GNUPLOT_H

/*
 * Pictures drawn by gnuplot, each as SVG and PNG. Data goes into the script, so nothing is left
 * beside the pictures.
 *
 * It knows a program and a folder, not what is drawn. Invariant: a program that is not there, or
 * that stops, is a message and never the end of this process.
 */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct cli_gnuplot {
    const char *folder;
    FILE *script; /* data blocks and settings may be written to it */
    uint32_t drawn;
} cli_gnuplot;

/** Make the folder if it is not there, start gnuplot. @return false after a message */
bool cli_gnuplot_open(cli_gnuplot *gnuplot, const char *folder);

/** One picture: folder/name.svg and folder/name.png. Both texts are gnuplot's language. */
void cli_gnuplot_draw(cli_gnuplot *gnuplot, const char *name, const char *settings,
                      const char *body);

/** @return false after a message if gnuplot failed, or if nothing was drawn where there is a @p
 * remedy; NULL: there may be nothing */
bool cli_gnuplot_close(cli_gnuplot *gnuplot, const char *remedy);

#endif
