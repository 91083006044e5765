/* SPDX-License-Identifier: Apache-2.0 */

/* Lines of a terminal or a file; see the header. */

#include "line_input.h"

#include "interrupt.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#if KVF_HAVE_LIBEDIT
#include "utf8.h"
#include <histedit.h>
#include <locale.h>
#endif

struct cli_line_input {
    char *line; /* of getline */
    size_t capacity;
    bool (*work)(void *user); /* while nothing is typed; NULL = there is none */
    void *user;
#if KVF_HAVE_LIBEDIT
    EditLine *edit; /* NULL: input or output is no terminal */
    History *history;
    const char *prompt;
#endif
};

static cli_line_end take(const char *bytes, size_t size, kvf_text *line)
{
    while (size > 0 && (bytes[size - 1] == '\n' || bytes[size - 1] == '\r'))
        size--;
    return kvf_text_append(line, bytes, size, NULL) == KVF_OK ? CLI_LINE_READ : CLI_LINE_END;
}

/* @return false after Ctrl-C. The signal may arrive in any thread, and in front of a read as well
 * as in it, so it is asked for now and then instead of waited for. */
static bool wait_for_input(const cli_line_input *in)
{
    enum { ASK_MS = 100 };
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    bool has_work = in->work != NULL;
    while (!cli_interrupted()) {
        if (poll(&input, 1, has_work ? 0 : ASK_MS) > 0)
            return true;
        has_work = has_work && in->work(in->user);
    }
    return false;
}

static cli_line_end read_plain(cli_line_input *in, const char *prompt, kvf_text *line)
{
    if (isatty(STDIN_FILENO))
        fputs(prompt, stderr);
    else
        while (in->work && !cli_interrupted() && in->work(in->user))
            ;
    if (!wait_for_input(in))
        return CLI_LINE_INTERRUPTED;
    const ssize_t size = getline(&in->line, &in->capacity, stdin);
    return size >= 0 ? take(in->line, (size_t)size, line) : CLI_LINE_END;
}

#if KVF_HAVE_LIBEDIT
static char *tell_prompt(EditLine *edit)
{
    cli_line_input *in = NULL;
    el_get(edit, EL_CLIENTDATA, &in);
    return (char *)(uintptr_t)in->prompt; /* not written to */
}

/* One character; Ctrl-C ends the line, while libedit itself would read on. A Ctrl-D typed while an
 * answer was written ended a line of the terminal then, and is read as a zero byte now. */
static int read_character(EditLine *edit, wchar_t *out)
{
    char bytes[4];
    uint32_t code = 0;
    cli_line_input *in = NULL;
    el_get(edit, EL_CLIENTDATA, &in);
    for (size_t size = 0; size < sizeof bytes;) {
        if (!wait_for_input(in))
            return -1;
        const ssize_t got = read(STDIN_FILENO, bytes + size, 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return (int)got;
        size++;
        if (utf8_decode(bytes, size, &code) == size) {
            *out = code ? (wchar_t)code : L'\x04';
            return 1;
        }
    }
    *out = 0xfffd;
    return 1;
}

static void open_edit(cli_line_input *in)
{
    HistEvent event;
    if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO))
        return;
    setlocale(LC_CTYPE, ""); /* how characters are shown */
    in->edit = el_init("kvferry", stdin, stdout, stderr);
    in->history = in->edit ? history_init() : NULL;
    if (!in->edit)
        return;
    el_set(in->edit, EL_CLIENTDATA, in);
    el_set(in->edit, EL_PROMPT, tell_prompt);
    el_set(in->edit, EL_EDITOR, "emacs");
    el_set(in->edit, EL_SIGNAL, 0);
    el_set(in->edit, EL_GETCFN, read_character);
    if (in->history && history(in->history, &event, H_SETSIZE, 1000) == 0)
        el_set(in->edit, EL_HIST, history, in->history);
}

static cli_line_end read_edited(cli_line_input *in, const char *prompt, kvf_text *line)
{
    HistEvent event;
    int size = 0;
    in->prompt = prompt;
    const char *bytes = el_gets(in->edit, &size);
    if (cli_interrupted()) {
        fputs("\n", stdout);
        return CLI_LINE_INTERRUPTED;
    }
    if (!bytes || size <= 0)
        return CLI_LINE_END;
    if (in->history && size > 1)
        history(in->history, &event, H_ENTER, bytes);
    return take(bytes, (size_t)size, line);
}
#endif

cli_line_input *cli_line_open(void)
{
    cli_line_input *in = calloc(1, sizeof *in);
    if (!isatty(STDIN_FILENO)) /* a terminal gives single lines; else none waits in a buffer */
        setvbuf(stdin, NULL, _IONBF, 0);
#if KVF_HAVE_LIBEDIT
    if (in)
        open_edit(in);
#endif
    return in;
}

void cli_line_close(cli_line_input *in)
{
    if (!in)
        return;
#if KVF_HAVE_LIBEDIT
    if (in->history)
        history_end(in->history);
    if (in->edit)
        el_end(in->edit);
#endif
    free(in->line);
    free(in);
}

void cli_line_idle(cli_line_input *in, bool (*work)(void *user), void *user)
{
    in->work = work;
    in->user = user;
}

cli_line_end cli_line_read(cli_line_input *in, const char *prompt, kvf_text *line)
{
    cli_interrupt_watch();
#if KVF_HAVE_LIBEDIT
    const cli_line_end end =
        in->edit ? read_edited(in, prompt, line) : read_plain(in, prompt, line);
#else
    const cli_line_end end = read_plain(in, prompt, line);
#endif
    cli_interrupt_watch();
    return end;
}

const char *cli_line_editing(void)
{
#if KVF_HAVE_LIBEDIT
    return "libedit";
#else
    return "none: built without libedit (libedit-dev)";
#endif
}
