# SPDX-License-Identifier: Apache-2.0
"""kvferry-llama: how it looks at programs, what it starts, plans, and what it refuses; no llama.cpp is needed.

Programs are made here: they link a library of ggml's names, and print what they were given.
"""
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest

PLUGIN = os.environ.get("KVFERRY_LLAMA_PLUGIN", "")
GGML = """
#include <stdio.h>
void *ggml_backend_load(const char *path) { printf("asked for %s\\n", path); return 0; }
void *ggml_backend_reg_by_name(const char *name) { return name[0] == 'C' ? (void *)1 : 0; }
"""
GGML_LATER = GGML.replace("(void *)1", "(void *)0") # no backend is there before the program loads some
NO_GGML = "int ggml_nothing;\n"
PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
%s
int main(int argc, char **argv)
{
    %s
    for (int i = 1; i < argc; i++)
        printf("%%s ", argv[i]);
    const char *names[] = {"GGML_BACKEND_PATH", "LD_PRELOAD", "KVFERRY_LLAMA_REPORT"};
    for (int i = 0; i < 3; i++)
        printf("\\n%%s=%%s", names[i], getenv(names[i]) ? getenv(names[i]) : "");
    const char *fd = getenv("KVFERRY_LLAMA_REPORT");
    if (fd && getenv("TELL") && write(atoi(fd), "loaded ggml=0 api=0\\n", 20) != 20)
        return 9;
    printf("\\npid=%%d\\n", (int)getpid());
    return 3;
}
"""
USES = ("void *ggml_backend_load(const char *);", "if (argc > 99) ggml_backend_load(argv[0]);")


def word(text):
    """A text as GGUF has it."""
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(path, arch, **keys):
    """The head of a GGUF file: numbers, and lists of numbers."""
    rows = [word("general.architecture") + struct.pack("<I", 8) + word(arch)]
    for name, value in keys.items():
        name = word("%s.%s" % (arch, name.replace("__", ".")))
        if isinstance(value, list):
            rows.append(name + struct.pack("<IIQ", 9, 4, len(value)) + struct.pack("<%dI" % len(value), *value))
        else:
            rows.append(name + struct.pack("<II", 4, value))
    with open(path, "wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(rows)) + b"".join(rows))


class Launch(unittest.TestCase):
    """Programs that the launcher looks at and starts."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        for name, text in (("base", NO_GGML), ("cpu", NO_GGML)):
            cls.compile("libggml-%s.so" % name, text, "-shared", "-fPIC")
        cls.compile("libggml.so", GGML, "-shared", "-fPIC")
        os.mkdir(os.path.join(cls.folder, "later"))
        cls.compile("later/libggml.so", GGML_LATER, "-shared", "-fPIC")
        own = ["-Wl,-rpath,$ORIGIN", "-L" + cls.folder, "-Wl,--no-as-needed"]
        later = ["-Wl,-rpath,$ORIGIN/later:$ORIGIN", "-L" + os.path.join(cls.folder, "later"), *own[1:]]
        cls.compile("llama-server", PROGRAM % USES, *own, "-lggml", "-lggml-base", "-lggml-cpu")
        cls.compile("llama-loads", PROGRAM % USES, *later, "-lggml", "-lggml-base")
        cls.compile("static-server", PROGRAM % ("const char *ggml_backend_reg_text = \"ggml_backend_reg\";",
                                                "if (argc > 99) puts(ggml_backend_reg_text);"))
        cls.compile("other", PROGRAM % ("", ""))

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    @classmethod
    def compile(cls, name, text, *options):
        """One file of C."""
        source = os.path.join(cls.folder, "source.c")
        with open(source, "w", encoding="utf-8") as out:
            out.write(text)
        subprocess.run(["cc", "-o", os.path.join(cls.folder, name), source, *options], check=True)

    def go(self, *words, **env):
        """The launcher, run to its end."""
        known = {name: value for name, value in os.environ.items()
                 if name not in ("GGML_BACKEND_PATH", "LD_PRELOAD", "KVFERRY_LLAMA")}
        # LD_PRELOAD is given by a shell between us and the launcher: Python must not have it itself.
        return subprocess.run([sys.executable, "-m", "kvferry._llama", *words], env={**known, **env}, timeout=60,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)

    def program(self, name):
        """The path of one of the programs."""
        return os.path.join(self.folder, name)

    def test_execs_with_flash_attention_on(self):
        """Same process, status and arguments; -fa on is added; a build with its backends linked gets LD_PRELOAD."""
        process = subprocess.Popen([sys.executable, "-m", "kvferry._llama", self.program("llama-server"), "-m", "x y"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TELL": "1"})
        out, said = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 3, said)
        self.assertTrue(out.startswith("asked for %s\n-m x y -fa on " % os.path.abspath(PLUGIN)), out)
        self.assertIn("pid=%d\n" % process.pid, out)
        self.assertIn("GGML_BACKEND_PATH=\n", out)
        self.assertEqual(said, "")

    def test_given_flash_attention_stays(self):
        """-fa in any form, or its variable, is the user's."""
        for words in (["-fa", "off"], ["--flash-attn", "auto"], ["--flash-attn=on"]):
            out = self.go(self.program("llama-server"), *words).stdout
            self.assertIn("\n" + " ".join(words) + " \n", out)
        out = self.go(self.program("llama-server"), "-v", LLAMA_ARG_FLASH_ATTN="auto").stdout
        self.assertIn("\n-v \n", out)

    def test_way(self):
        """GGML_BACKEND_PATH where a build loads its backends, but not over another one's."""
        out = self.go(self.program("llama-loads")).stdout
        self.assertIn("GGML_BACKEND_PATH=%s\n" % os.path.abspath(PLUGIN), out)
        out = self.go(self.program("llama-loads"), GGML_BACKEND_PATH="/other.so").stdout
        self.assertIn("GGML_BACKEND_PATH=/other.so\n", out)

    def test_silence_is_said(self):
        """A program that ends and did not load the plug-in; what loads it is not spoken of."""
        said = self.go(self.program("llama-loads")).stderr
        self.assertIn("kvferry: llama-loads ended without having loaded kvferry", said)
        self.assertEqual(self.go(self.program("llama-loads"), TELL="1").stderr, "")

    def test_watcher_is_no_child(self):
        """The program has no child that it did not start, and what reads its output is not kept waiting."""
        shutil.copy("/bin/sleep", self.program("sleep"))
        begin = time.monotonic()
        script = self.program("wrapper")
        with open(script, "w", encoding="utf-8") as out:
            out.write("#!/bin/sh\nps -o pid= --ppid $$ | wc -l\n")
        os.chmod(script, 0o755)
        out = self.go(script).stdout
        self.assertLessEqual(int(out), 2, "ps and wc are its children, and nothing else")
        self.assertLess(time.monotonic() - begin, 15)

    def test_refused_programs(self):
        """Each with its reason, and nothing is started."""
        for name, status, text in ((self.program("static-server"), 1, "is a static build of llama.cpp"),
                                   (self.program("other"), 1, "is no program of llama.cpp"),
                                   (sys.executable, 1, "import kvferry.llama"),
                                   ("no-such-program", 127, "there is no program no-such-program"),
                                   ("--pth", 2, "there is no option --pth")):
            done = self.go(name)
            self.assertEqual((done.returncode, done.stdout), (status, ""), done.stderr)
            self.assertIn(text, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1)

    def test_import_brings_the_binding(self):
        """A binding that is not loaded yet is imported; one without ggml is said, and the process goes on."""
        with open(os.path.join(self.folder, "llama_cpp.py"), "w", encoding="utf-8") as out:
            out.write("print('the binding')\n")
        done = subprocess.run([sys.executable, "-c", "import kvferry.llama; print(kvferry.llama.loaded)"], text=True,
                              env={**os.environ, "PYTHONPATH": self.folder + ":" + os.environ["PYTHONPATH"]},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, "the binding\nFalse\n"), done.stderr)
        self.assertIn("not loaded: there is no ggml", done.stderr)

    def test_refused_settings(self):
        """Status 2 and the library's text, before anything starts."""
        for settings in ("budget=many", "budgt=1", "budget=0", "rows=0", "pages=k9"):
            done = self.go(self.program("llama-server"), KVFERRY_LLAMA=settings)
            self.assertEqual((done.returncode, done.stdout), (2, ""), settings)
            self.assertIn(settings.split("=")[0], done.stderr)

    def test_path(self):
        """One line, for a command substitution."""
        self.assertEqual(self.go("--path").stdout, os.path.abspath(PLUGIN) + "\n")

    def test_check_of_what_is_no_ggml(self):
        """A library whose ggml lacks everything is refused in the plug-in's words."""
        done = self.go("--check", self.program("libggml.so"))
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertTrue(done.stderr.startswith("kvferry-llama: "), done.stderr)


class Plan(unittest.TestCase):
    """Memory by the metadata of a file."""

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.path = os.path.join(self.folder, "m.gguf")

    def tearDown(self):
        shutil.rmtree(self.folder)

    def layers(self, arch, **keys):
        """Layers of a file."""
        from kvferry._llama import gguf as reader
        gguf(self.path, arch, block_count=8, embedding_length=512, attention__head_count=8, **keys)
        return reader.layers(reader.metadata(self.path))

    def test_dense(self):
        """All layers, heads as wide as the model says or as its width divides."""
        self.assertEqual(self.layers("llama", attention__head_count_kv=2), [(8, 2, 64, 64, 0)] * 8)
        self.assertEqual(self.layers("qwen3", attention__head_count_kv=2, attention__key_length=128,
                                     attention__value_length=96), [(8, 2, 128, 96, 0)] * 8)

    def test_hybrid(self):
        """Layers with keys, by their interval, by a list, or by heads of 0; MTP's layers are not the model's."""
        self.assertEqual(len(self.layers("qwen35", attention__head_count_kv=2)), 2)
        self.assertEqual(len(self.layers("qwen35", attention__head_count_kv=2, full_attention_interval=2)), 4)
        self.assertEqual(len(self.layers("qwen35", attention__head_count_kv=2, nextn_predict_layers=4)), 1)
        self.assertEqual(len(self.layers("granitehybrid", attention__head_count_kv=[0, 0, 0, 2] * 2)), 2)

    def test_windows(self):
        """By a list, or by the family's period."""
        window = {"attention__head_count_kv": 2, "attention__sliding_window": 64}
        self.assertEqual([layer.window for layer in self.layers("gemma3", **window)], [64] * 5 + [0] + [64] * 2)
        self.assertEqual([layer.window for layer in self.layers(
            "gemma4", attention__sliding_window_pattern=[1, 0] * 4, attention__shared_kv_layers=2, **window)],
            [64, 0] * 3)
        self.assertEqual([layer.window for layer in self.layers("phi3", **window)], [0] * 8)

    def test_refused(self):
        """Nothing is guessed that the file does not tell."""
        from kvferry._llama import Refused
        for arch, keys, text in (("deepseek2", {"attention__kv_lora_rank": 512}, "latent keys"),
                                 ("new", {"attention__sliding_window": 64}, "name the layers that have them"),
                                 ("granitehybrid", {"attention__head_count_kv": [0] * 8}, "no layer with keys")):
            with self.assertRaisesRegex(Refused, text):
                self.layers(arch, **keys)
        with open(self.path, "wb") as out:
            out.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 9))
        with self.assertRaisesRegex(Refused, "cannot be read"):
            from kvferry._llama import gguf as reader
            reader.metadata(self.path)

    def test_verdict(self):
        """Bytes follow from cells; status 1 where they do not fit."""
        gguf(self.path, "llama", block_count=32, embedding_length=4096, attention__head_count=32,
             attention__head_count_kv=8, context_length=131072)
        def go(*words):
            return subprocess.run([sys.executable, "-m", "kvferry._llama", "--plan", self.path, *words], text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        done = go("--host", "64GiB")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("131072 cells: KV cache 16.00,", done.stdout)
        self.assertIn("4 x 2048 cells: KV cache 1.00,", go("--host", "64GiB", "-c", "8192", "-np", "4").stdout)
        self.assertIn("8192 cells: KV cache 0.53,", go("--host", "64GiB", "-c", "8192", "-np", "4", "-kvu", "-ctk",
                                                       "q8_0", "-ctv", "q8_0").stdout)
        done = go("--host", "8GiB", "--gpu", "24GiB")
        self.assertEqual(done.returncode, 1)
        self.assertIn("does not fit", done.stdout)


if __name__ == "__main__":
    if not PLUGIN or not os.path.exists(PLUGIN):
        print("skipped: KVFERRY_LLAMA_PLUGIN names no plug-in")
        sys.exit(77)
    unittest.main()
