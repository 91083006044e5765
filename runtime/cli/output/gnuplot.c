/* SPDX-License-Identifier: Apache-2.0 */

/* Starts gnuplot and hands it scripts; see the header. */

#include "gnuplot.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>

static bool folder_usable(const char *folder)
{
    struct stat status;
    if (strpbrk(folder, "'\n\\")) {
        fputs("kvferry: --plot: the folder's name has a quote, a backslash or a line break\n",
              stderr);
        return false;
    }
    if (mkdir(folder, 0777) != 0 && errno != EEXIST) {
        fprintf(stderr, "kvferry: --plot: %s cannot be made: %s\n", folder, strerror(errno));
        return false;
    }
    if (stat(folder, &status) == 0 && S_ISDIR(status.st_mode))
        return true;
    fprintf(stderr, "kvferry: --plot: %s is no folder\n", folder);
    return false;
}

bool cli_gnuplot_open(cli_gnuplot *gnuplot, const char *folder)
{
    *gnuplot = (cli_gnuplot){.folder = folder};
    if (!folder_usable(folder))
        return false;
    /* A shell without gnuplot ends at once; writing to it then must be an error, not a signal. */
    signal(SIGPIPE, SIG_IGN);
    gnuplot->script = popen("exec gnuplot - 2>/dev/null", "w");
    if (!gnuplot->script)
        fputs("kvferry: --plot: gnuplot could not be started\n", stderr);
    return gnuplot->script != NULL;
}

void cli_gnuplot_draw(cli_gnuplot *gnuplot, const char *name, const char *settings,
                      const char *body)
{
    static const struct {
        const char *terminal;
        const char *suffix;
    } forms[] = {{"svg size 900,560 dynamic background rgb 'white' font 'sans,14'", "svg"},
                 {"pngcairo size 900,560 background rgb 'white' font 'sans,11'", "png"}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        fprintf(gnuplot->script,
                "reset\nset terminal %s\nset output '%s/%s.%s'\n%s%s\nunset output\n",
                forms[i].terminal, gnuplot->folder, name, forms[i].suffix, settings, body);
    gnuplot->drawn++;
}

bool cli_gnuplot_close(cli_gnuplot *gnuplot, const char *remedy)
{
    if (pclose(gnuplot->script) != 0)
        fputs("kvferry: --plot: gnuplot failed; is it installed (apt install gnuplot-nox)?\n",
              stderr);
    else if (gnuplot->drawn == 0 && remedy)
        fprintf(stderr, "kvferry: --plot: nothing to draw; %s\n", remedy);
    else
        return true;
    return false;
}
