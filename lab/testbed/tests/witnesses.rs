//! The words of the witnesses: each one's script works here as in its guest, what it has is damaged
//! behind its second check, and the next must tell of it.
//!
//! What is damaged and what tells of it are the scripts' own. SQLite is a real one; programs stand
//! in for the compiler and for Redis, of which it is tried what a script makes of an answer.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use godwit_testbed::skip;

const INIT: &str = include_str!("../witnesses/init");
const SQLITE: &str = include_str!("../witnesses/sqlite");
const COMPILER: &str = include_str!("../witnesses/compiler");
const REDIS: &str = include_str!("../witnesses/redis");

/// Checks of a witness that is not damaged.
const CHECKS: usize = 4;

/// Where a witness works, instead of in its guest.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("godwit-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("bin")).unwrap();
        Self(path)
    }

    /// Puts a program there, which is found before those of the host.
    fn program(&self, name: &str, script: &str) {
        let path = self.0.join("bin").join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn shell(&self, script: &str) -> Output {
        let path = std::env::var("PATH").unwrap_or_default();
        Command::new("timeout")
            .args(["60", "sh", "-c", script])
            .current_dir(&self.0)
            .env("PLACE", &self.0)
            .env("PATH", format!("{}:{path}", self.0.join("bin").display()))
            .output()
            .unwrap()
    }

    /// Has the witness `name` do its checks, with the `damage` behind the second; its lines.
    fn lines(&self, name: &str, script: &str, damage: &str) -> Vec<String> {
        // Its own words, said once.
        let (checked, bug) = (function("ok").replacen("ok", "checked", 1), function("bug"));
        let bug = bug.replace("sleep 1", "exit");
        let script = format!(
            "name={name} checks=0\n{checked}\n{bug}\ndisk() {{ :; }}\nword() {{ :; }}\n\
             damage() {{ {damage}; }} >/dev/null\nok() {{ checked; \
             [ $checks -ne 2 ] || damage; [ $checks -lt {CHECKS} ] || exit 0; }}\n{script}"
        );
        // The guest's places.
        let script = script.replace("/tmp/", "$PLACE/").replace("/data", "$PLACE");
        let output = self.shell(&script);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().filter(|line| is_told(line)).map(str::to_owned).collect()
    }

    /// What it says of each damage that is done to it, and that it says nothing where none is.
    fn tells(&self, name: &str, script: &str, damages: &[(&str, &str)]) {
        let ok = |count: usize| -> Vec<String> {
            (1..=count).map(|check| format!("WITNESS {name} {check} ok")).collect()
        };
        let again = |damage: &str| {
            for entry in fs::read_dir(&self.0).unwrap().flatten() {
                if entry.path().is_file() {
                    fs::remove_file(entry.path()).unwrap();
                }
            }
            self.lines(name, script, damage)
        };
        assert_eq!(again(":"), ok(CHECKS), "{name} is not damaged");
        for (damage, words) in damages {
            let said = again(damage);
            assert_eq!(said[..said.len().min(2)], ok(2), "{damage}: {said:?}");
            let [bug] = &said[2..] else { panic!("{damage}: {said:?}") };
            let own = bug.strip_prefix(&format!("BUG {name}: ")).unwrap_or_default();
            assert!(own.contains(words), "{damage}: {bug}");
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn is_told(line: &str) -> bool {
    line.starts_with("WITNESS ") || line.starts_with("BUG ")
}

/// A function of the guest's process 1.
fn function(name: &str) -> &'static str {
    let from = INIT.find(&format!("\n{name}() {{")).unwrap() + 1;
    let length = INIT[from..].find("\n}\n").unwrap() + 2;
    &INIT[from..from + length]
}

#[test]
fn the_witness_with_sqlite_tells_of_a_damaged_database() {
    let place = Place::new("witness-sqlite");
    // That of `make witnesses`, where it was made.
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/witnesses-build/sqlite/root");
    let program = root.join("usr/bin/sqlite3");
    if program.is_file() {
        let libraries = ["usr/lib", "lib"].map(|dir| root.join(dir).join("x86_64-linux-gnu"));
        let [first, second] = libraries.map(|dir| dir.display().to_string());
        place.program(
            "sqlite3",
            &format!(
                "exec {second}/ld-linux-x86-64.so.2 --library-path {first}:{second} {} \"$@\"",
                program.display()
            ),
        );
    }
    if !place.shell("sqlite3 :memory: \"select sha3('')\"").status.success() {
        skip("the_witness_with_sqlite_tells_of_a_damaged_database", "no sqlite3 with sha3()");
        return;
    }
    place.tells(
        "sqlite",
        SQLITE,
        &[
            // Integrity, rows that are not as they were written, the last one, and how many.
            ("sqlite3 $db 'update entry set body = randomblob(9) where id = 150'", "ok;1;600;600;"),
            ("sqlite3 $db 'delete from entry where id = 300'", "ok;0;600;599;"),
            // The end of a transaction that was acknowledged.
            ("sqlite3 $db 'delete from entry where id > 390'", "ok;0;590;590;"),
            // A byte that no row needs: the free bytes of a page.
            (
                "printf '\\005' | dd of=$db bs=1 seek=$((39 * 4096 + 7)) conv=notrunc 2>/dev/null",
                "Fragmentation of",
            ),
            (
                "printf ABCD | dd of=$db bs=4096 seek=40 conv=notrunc 2>/dev/null",
                "database disk image is malformed",
            ),
        ],
    );
}

#[test]
fn the_witness_with_a_compiler_tells_of_a_damaged_build() {
    let place = Place::new("witness-compiler");
    // What it makes of the program says what that was.
    place.program(
        "tcc",
        "[ ! -e fails ] || { echo 'program.c:7: error: damaged' >&2; exit 1; }\n\
         while [ \"$1\" != -o ]; do shift; done\n\
         printf '#!/bin/sh\\necho %s\\n' \"$(cksum <program.c | tr ' ' -)\" >\"$2\"\n\
         [ ! -e slips ] || { echo '#' >>\"$2\"; rm slips; }\n\
         chmod +x \"$2\"",
    );
    place.tells(
        "compiler",
        COMPILER,
        &[
            (
                "printf x | dd of=program.c bs=1 seek=99 conv=notrunc 2>/dev/null",
                "a build differs from the first one",
            ),
            ("echo '#' >>reference", "a build differs from the first one"),
            (": >slips", "two builds differ"),
            (": >fails", "program.c:7: error: damaged"),
            // In the memory of the shell.
            ("answer=1", "the program says something else"),
        ],
    );
}

#[test]
fn the_witness_with_redis_tells_of_a_damaged_answer() {
    let place = Place::new("witness-redis");
    place.program("ip", "exit 0");
    place.program("redis-server", "echo 'it has begun'");
    place.program("nc", "if [ -e $PLACE/answer ]; then cat $PLACE/answer; else echo +PONG; fi");
    place.program("sleep", "exit 0");
    place.tells(
        "redis",
        REDIS,
        &[
            ("echo +PONH >$PLACE/answer", "it said '+PONH'; it has begun"),
            ("echo '-ERR no memory' >$PLACE/answer", "it said '-ERR no memory'; it has begun"),
            // Nobody answers.
            (": >$PLACE/answer", "it said ''; it has begun"),
        ],
    );
}
