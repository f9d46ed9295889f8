//! The command line of a destination, out of that of its source.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::description::Description;
use super::mapping::Mapping;
use super::options::{Fate, fate};
use super::refused;
use super::values::{Needs, Places, monitor_of_others};
use crate::QemuError;
use crate::command_line::{Given, find, options, parts};

/// The chardev of godwit's own monitor, which the next destination has under another path.
const MONITOR: &str = "godwit-monitor";
/// More words are no command line of a machine's.
const MOST_WORDS: usize = 4096;
/// More bytes in one are nobody's path or name.
const LONGEST_WORD: usize = 1 << 17;

/// A command line without its program.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Carried {
    pub(super) words: Vec<String>,
    /// What the source has and the destination has not.
    pub(super) left_out: Vec<String>,
}

/// The options of a destination with its monitor at `monitor`, out of what the source told.
///
/// # Errors
/// The first thing that cannot be carried, with the cure.
pub(super) fn carry(
    source: &Description,
    (mappings, scripts): (&[Mapping], &[PathBuf]),
    monitor: &Path,
) -> Result<Carried, QemuError> {
    carry_with(source, (mappings, scripts), false, monitor)
}

/// The same; with `in_place` files of memory are the source's own.
pub(super) fn carry_with(
    source: &Description,
    (mappings, scripts): (&[Mapping], &[PathBuf]),
    in_place: bool,
    monitor: &Path,
) -> Result<Carried, QemuError> {
    if source.words.len() > MOST_WORDS || source.words.iter().any(|it| it.len() > LONGEST_WORD) {
        return Err(refused("the source's command line is too long to be one"));
    }
    if source.words.iter().any(|word| word.contains('\0')) {
        return Err(refused("the source's command line is none: it has a NUL in it"));
    }
    let places = Places { directory: &source.directory, mappings, scripts, in_place };
    let mut carried = Carried::default();
    let all = options(&source.words);
    all.iter().try_for_each(|given| check_monitor(given, &all))?;
    for given in &all {
        carry_one(given, &source.machine, &places, &mut carried)?;
    }
    // A name for a machine type that has its version in it may be another type here.
    check_machine(&source.machine)?;
    carried.words.extend(["-machine".to_owned(), source.machine.clone()]);
    carried.words.extend(own_words(monitor));
    // QEMU has one of its own otherwise, which whoever sees the screen has as well.
    let none = |given: &Given| given.name == "monitor" && given.value.as_deref() == Some("none");
    if !all.iter().any(|given| given.name == "nodefaults" || none(given)) {
        carried.words.extend(["-monitor", "none"].map(str::to_owned));
    }
    Ok(carried)
}

/// A monitor of godwit's, at which the guest is awaited.
pub(super) fn own_words(monitor: &Path) -> [String; 6] {
    let socket = monitor.display().to_string().replace(',', ",,");
    [
        "-chardev".to_owned(),
        format!("socket,id={MONITOR},path={socket},server=on,wait=off"),
        "-mon".to_owned(),
        format!("chardev={MONITOR},mode=control"),
        "-incoming".to_owned(),
        "defer".to_owned(),
    ]
}

/// Refuses a monitor on a line that others than this host reach.
fn check_monitor(given: &Given, all: &[Given]) -> Result<(), QemuError> {
    let value = given.value.as_deref().unwrap_or_default();
    let is_monitor = given.name == "mon" || is_monitor_object(given);
    let id = match given.name.as_str() {
        "mon" => find(value, "chardev", "chardev"),
        "object" if is_monitor => find(value, "chardev", ""),
        "monitor" | "qmp" | "qmp-pretty" => value.strip_prefix("chardev:").map(str::to_owned),
        "serial" | "parallel" | "debugcon" => value.strip_prefix("mon:chardev:").map(str::to_owned),
        _ => return Ok(()),
    };
    let Some(id) = id else {
        return if is_monitor { Err(monitor_of_others(&given.name, value)) } else { Ok(()) };
    };
    let line = all.iter().filter(|it| it.name == "chardev").filter_map(|it| it.value.as_deref());
    let mut line = line.filter(|it| find(it, "id", "").as_deref() == Some(&id));
    let on = |text: Option<String>| text.is_some_and(|text| matches!(&*text, "on" | "true"));
    let here = |line: &str| {
        let listens = on(find(line, "server", ""))
            || !line.starts_with('{') && parts(line).iter().any(|part| part == "server");
        find(line, "backend", "backend").as_deref() == Some("socket")
            && find(line, "path", "").is_some()
            && find(line, "host", "").is_none()
            && listens
            && has_each_key_once(line)
    };
    match (line.next(), line.next()) {
        (Some(line), None) if here(line) => Ok(()),
        _ => Err(monitor_of_others(&given.name, value)),
    }
}

/// Whether QEMU makes a monitor as an object of it, which it can from 11.1 on.
fn is_monitor_object(given: &Given) -> bool {
    let kind = given.value.as_deref().and_then(|value| find(value, "qom-type", "qom-type"));
    given.name == "object" && kind.is_some_and(|kind| kind.starts_with("monitor-"))
}

/// Whether a value says everything once: of what it says twice QEMU takes the last.
fn has_each_key_once(value: &str) -> bool {
    let parts = if value.starts_with('{') { Vec::new() } else { parts(value) };
    // What stands first and alone is the kind.
    let key = |(at, part): (usize, &String)| match part.split_once('=') {
        Some((key, _)) => key.to_owned(),
        None if at == 0 => "backend".to_owned(),
        None => part.clone(),
    };
    let keys: BTreeSet<String> = parts.iter().enumerate().map(key).collect();
    keys.len() == parts.len()
}

/// Refuses what is no name of a machine type.
fn check_machine(name: &str) -> Result<(), QemuError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-._+".contains(c);
    match !name.is_empty() && name.len() < 100 && name.chars().all(fits) {
        true => Ok(()),
        false => Err(QemuError::Unclear("its machine type")),
    }
}

fn carry_one(
    given: &Given,
    machine: &str,
    places: &Places<'_>,
    to: &mut Carried,
) -> Result<(), QemuError> {
    let name = given.name.as_str();
    let value = given.value.as_deref();
    let shown = format!("-{name}{}", value.map_or_else(String::new, |value| format!(" {value}")));
    let own = |key: &str| value.and_then(|it| find(it, key, key)).as_deref() == Some(MONITOR);
    if name == "chardev" && own("id") || name == "mon" && own("chardev") {
        return Ok(());
    }
    // What an earlier destination was given as well.
    if matches!(name, "machine" | "M") && value == Some(machine) {
        return Ok(());
    }
    let fate = fate(name).ok_or_else(|| {
        refused(format!(
            "the source QEMU has an option that godwit does not carry: {shown}; start the \
             destination by hand (godwit receive --vm)"
        ))
    })?;
    let needed = || value.ok_or_else(|| refused(format!("-{name} of the source has no value")));
    let mapped = match fate {
        Fate::Refused(why) => {
            return Err(refused(format!("the source QEMU was started with {shown}: {why}")));
        }
        Fate::LeftOut => {
            to.left_out.push(shown);
            return Ok(());
        }
        Fate::Flag => None,
        // QEMU takes it for a path first.
        Fate::Text if name == "k" && needed()?.contains('/') => {
            return Err(refused(format!("the source QEMU has {shown}: a keyboard has no path")));
        }
        Fate::Text => Some(needed()?.to_owned()),
        Fate::File => Some(places.map(name, needed()?, Needs::File)?),
        Fate::Made => Some(places.map(name, needed()?, Needs::Directory)?),
        Fate::Settings => Some(places.settings(needed()?)?),
        Fate::Looked(kind) => Some(places.look(name, needed()?, kind)?),
    };
    // What stands alone is a disk, and could be taken for an option's value here.
    let name = if name.is_empty() { "hda" } else { name };
    to.words.push(format!("-{name}"));
    to.words.extend(mapped);
    Ok(())
}

/// A command line as a shell takes it, without the secrets in it.
pub(super) fn shown(program: &Path, words: &[String]) -> String {
    let program = program.display().to_string();
    let all = std::iter::once(program.as_str()).chain(words.iter().map(String::as_str));
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,=:+@%".contains(c);
    let quoted = |word: String| match !word.is_empty() && word.chars().all(plain) {
        true => word,
        false => format!("'{}'", word.replace('\'', r"'\''")),
    };
    all.map(without_secret).map(quoted).collect::<Vec<_>>().join(" ")
}

/// A value without what it has of a secret (`-object secret,data=…`, a password).
fn without_secret(word: &str) -> String {
    let hides = |key: &str| matches!(key, "data" | "password");
    if word.starts_with('{') {
        let Ok(mut json) = serde_json::from_str::<serde_json::Value>(word) else {
            return word.to_owned();
        };
        if let Some(map) = json.as_object_mut() {
            map.iter_mut().filter(|(key, _)| hides(key)).for_each(|(_, it)| *it = "...".into());
        }
        return json.to_string();
    }
    let part = |part: &str| match part.split_once('=') {
        Some((key, _)) if hides(key) => format!("{key}=..."),
        _ => part.to_owned(),
    };
    word.split(',').map(part).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(line: &str) -> Description {
        let words = line.split(' ').map(str::to_owned).collect();
        Description { words, directory: "/".to_owned(), machine: "pc-q35-7.2".to_owned() }
    }

    fn carried(line: &str) -> Result<Carried, String> {
        let mappings = ["/tmp", "/tmp/no-such-socket"];
        let mappings: Vec<Mapping> = mappings.iter().map(|it| it.parse().unwrap()).collect();
        let scripts = [PathBuf::from("/usr/bin/bridge")];
        carry(&source(line), (&mappings, &scripts), Path::new("/run/m"))
            .map_err(|error| error.to_string())
    }

    const OWN: &str = "-machine pc-q35-7.2 -chardev \
                       socket,id=godwit-monitor,path=/run/m,server=on,wait=off -mon \
                       chardev=godwit-monitor,mode=control -incoming defer";

    #[test]
    fn a_plain_command_line_is_carried_with_godwits_own_monitor() {
        let line = "qemu-system-x86_64 -machine q35 -m 4G -enable-kvm -daemonize -nodefaults \
                    -serial stdio -append root=/dev/vda -S";
        let Carried { words, left_out } = carried(line).unwrap();
        let expected = "-machine q35 -m 4G -enable-kvm -nodefaults -serial stdio -append \
                        root=/dev/vda";
        assert_eq!(words.join(" "), format!("{expected} {OWN}"));
        assert_eq!(left_out, ["-daemonize", "-S"]);
        let tap = "-netdev tap,id=n,ifname=tap1,script=/usr/bin/bridge,downscript=no";
        assert!(carried(&format!("q {tap}")).unwrap().words.join(" ").starts_with(tap));
        let net = "-netdev user,id=n,net=10.0.2.0/24 -smbios type=1,product=a/b";
        assert!(carried(&format!("q {net}")).unwrap().words.join(" ").starts_with(net));
        let back_end = "-chardev socket,id=c,path=/tmp/no-such-socket,reconnect=1 -device \
                        vhost-user-blk-pci,chardev=c -netdev vhost-user,id=n,chardev=c";
        assert!(carried(&format!("q {back_end}")).unwrap().words.join(" ").starts_with(back_end));
        let fixed = "-id 100 -smbios type=11,value=a:/b -vnc unix:/tmp/x";
        assert!(carried(&format!("q {fixed}")).unwrap().words.join(" ").starts_with(fixed));
        // And the same once more, of what came of it.
        let again = carried(&format!("qemu {}", words.join(" "))).unwrap();
        assert_eq!(again.words.join(" "), format!("{expected} {OWN}"));
    }

    #[test]
    fn what_a_source_must_not_decide_is_refused() {
        for (line, words) in [
            ("q -chroot /tmp", "-chroot"),
            ("q -runas nobody", "as the user"),
            ("q -readconfig /tmp/x", "name it by its whole path, --map /tmp/x"),
            ("q -device loader -global loader.file=/etc/shadow", "--map /etc/shadow"),
            ("q -global driver=loader,property=file,value=etc/shadow", "--map /etc/shadow"),
            ("q -device virtio-input-host-pci,evdev=dev/input/event0", "--map /dev/input/event0"),
            ("q -netdev user,id=n,tftp=../etc", "--map"),
            ("q -accel kvm,device=/dev/x", "--map /dev/x"),
            ("q -chardev socket,id=c,path=/tmp/no-such-socket", "name the very socket"),
            ("q -vnc unix:/etc/x,password=on", "--map /etc/x"),
            ("q -vnc unix:/tmp/no/such/x", "its directory is not there"),
            ("q -drive file=nbd:unix:/etc/x", "storage of a kind"),
            ("q -netdev socket,id=n,listen=exec:/bin/sh", "has 'exec:/bin/sh' in it"),
            ("q -plugin /tmp/x.so", "code that would run here"),
            ("q -snapshot", "temporary files"),
            ("q -add-fd fd=3,set=1", "descriptors"),
            ("q -unheard-of 1", "does not carry: -unheard-of 1"),
            ("q -netdev tap,id=n,fd=33", "descriptor"),
            ("q -netdev tap,id=n,script=/tmp/x", "run a program"),
            ("q -netdev user,id=n,guestfwd=tcp:1.2.3.4:1-cmd:sh", "run a program"),
            ("q -netdev tap,id=n,script=/usr/bin/bridge,downscript=/usr/bin/sh", "--script /usr"),
            ("q -netdev user,id=n,guestfwd=tcp:1.2.3.4:1-cmd:/usr/bin/bridge", "run a program"),
            ("q -device vfio-pci,host=01:00.0", "vfio-pci of the source is not carried"),
            ("q -object filter-dump,id=a,netdev=n,file=/tmp/x", "filter-dump"),
            ("q -chardev serial,id=a,path=/dev/ttyS0", "-chardev serial"),
            ("q -serial /dev/ttyS0", "line of its own host"),
            ("q -serial file:/etc/cron.d/x", "--map /etc/cron.d/x"),
            ("q -drive file=/dev/sda", "--map /dev/sda"),
            ("q -drive file=fat:rw:/tmp", "storage of a kind"),
            ("q -drive file.driver=vvfat,file.dir=/tmp", "vvfat"),
            ("q -blockdev {\"driver\":\"file\",\"filename\":\"/etc/shadow\"}", "--map /etc/shadow"),
            ("q -kernel ../etc/passwd", "--map"),
            ("q -drive file=/tmp/is/not/there", "not there"),
            ("q -m", "no value"),
            ("q -chardev socket,id=c,path=,server=on", "-chardev of the source has an empty path"),
            ("q -object {\"qom-type\":\"memory-backend-file\",\"mem-path\":\"\"}", "empty path"),
            ("q -drive file=,if=none", "empty path"),
            ("q -kernel ", "empty path"),
            ("q -serial file:", "empty path"),
            ("q -vnc unix:", "empty path"),
            ("q -vnc unix:etc/x", "--map /etc/x"),
        ] {
            let told = carried(line).unwrap_err();
            assert!(told.contains(words), "{line}: {told}");
            assert_eq!(told.lines().count(), 1, "{told}");
        }
        let long = Description { words: vec!["x".to_owned(); 5000], ..source("q") };
        assert!(carry(&long, (&[], &[]), Path::new("/run/m")).is_err());
        let odd = Description { machine: "q35,kernel=/x".to_owned(), ..source("q") };
        assert!(carry(&odd, (&[], &[]), Path::new("/run/m")).is_err());
    }

    /// Each of these had QEMU run, open or overwrite what nobody had named.
    #[test]
    fn a_hostile_source_gets_nothing_past_the_look() {
        let dir = std::env::temp_dir().join(format!("godwit-hostile-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let here = dir.display().to_string();
        std::fs::write(dir.join("other.qcow2"), "somebody's").unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.join("100.qmp")).unwrap();
        for line in [
            // Two commas are one in texts alone.
            "-netdev user,id=n,restrict,,guestfwd=tcp:10.0.2.100:1-cmd:sh",
            "-drive if=virtio,readonly,,file=json:{\"driver\":\"host_device\"}",
            "-netdev tap,id=n,vhost,,script=/tmp/x,script=no,downscript=no",
            "-blockdev {\"driver\":\"rbd\",\"=keyvalue-pairs\":\"x\"}",
            // Words behind the first of a line.
            "-serial tcp:127.0.0.1:9,server=on,wait=off,logfile=/etc/cron.d/x",
            "-serial tcp:127.0.0.1:9,logfile=x",
            "-serial unix:/tmp/a,server=on,path=/run/docker.sock",
            "-serial file:/tmp/a,b",
            // What is said twice, and looked for once.
            "-netdev user,id=n,restrict=on,restrict=off",
            "-chardev socket,id=x,host=127.0.0.1,port=1,server=on,port=2",
            "-serial tcp:127.0.0.1:9,server=on,server=off",
            "-machine type=q35,accel=tcg,type=pc",
            // Monitors.
            "-qmp tcp:0.0.0.0:4444,server=on,wait=off",
            "-monitor tcp:203.0.113.1:1",
            "-qmp unix:/tmp/x",
            "-serial mon:vc",
            "-serial mon:tcp:203.0.113.1:1",
            "-chardev socket,id=x,host=203.0.113.1,port=1 -mon chardev=x",
            "-chardev socket,id=x,path=/tmp/x -mon chardev=x",
            "-chardev vc,id=x -mon x",
            "-chardev socket,id=x,path=/tmp/x,server=on,backend=vc -mon x",
            "-chardev socket,id=x,path=/tmp/x,server=on,server=off -mon x",
            "-chardev socket,id=x,path=/tmp/x,server=on -chardev vc,id=x -mon x",
            "-monitor chardev:nobody",
            "-object monitor-qmp,id=m",
            "-chardev socket,id=x,host=203.0.113.1,port=1 -object monitor-hmp,id=m,chardev=x",
            "-chardev vc,id=x -object \
             {\"qom-type\":\"monitor-qmp\",\"id\":\"m\",\"chardev\":\"x\"}",
            // A line to another VM's monitor, in a directory that was named.
            &format!("-chardev socket,id=x,path={here}/100.qmp -device virtserialport,chardev=x"),
            &format!("-serial unix:{here}/100.qmp"),
            // Programs that QEMU has by itself.
            "-netdev tap,id=n",
            "-netdev tap,id=n,script=no",
            "-nic bridge,br=br0",
            "-netdev {\"type\":\"tap\",\"id\":\"n\"}",
            "-netdev af-xdp,id=n,ifname=eth0",
            "-netdev l2tpv3,id=n,src=a,dst=b,txsession=1",
            "-display spice-app",
            // Files and storage.
            "-acpitable data=../../etc/hostname://etc/shadow",
            "-global x.y=../../etc/hostname://etc/shadow",
            "-drive file=rbd:pool/image:log_file=/etc/cron.d/x",
            "-drive file=/dev/null,format=vvfat",
            "-blockdev driver=ssh,host=a,path=/x,node-name=n",
            "-drive file=/dev/null,file.locking=off",
            "-k /etc/shadow",
            "-device vhost-vsock-pci,guest-cid=3",
            // What is there already.
            &format!("-pidfile {here}/other.qcow2"),
            &format!("-serial file:{here}/other.qcow2"),
            &format!("-audiodev wav,id=a,path={here}/other.qcow2"),
            &format!("-object memory-backend-file,id=m,size=1G,mem-path={here}/other.qcow2"),
        ] {
            let done = carried(&format!("q {line}"));
            assert!(done.is_err(), "{line}: {done:?}");
        }
        // And what is like them and harmless still goes.
        for line in [
            "-netdev bridge,id=n,helper=/usr/bin/bridge",
            "-drive file=rbd:pool/image,if=virtio",
            "-chardev socket,id=x,path=/tmp/no-such-x,server -mon x",
            "-qmp unix:/tmp/no-such-x,server=on,wait=off",
            "-chardev socket,id=x,path=/tmp/no-such-x,server -object monitor-qmp,id=m,chardev=x",
            "-append a,,b=c",
            "-monitor stdio",
            "-netdev user,id=n,hostfwd=tcp:127.0.0.1:0-:22,hostfwd=tcp:127.0.0.1:0-:23",
            "-smbios type=11,value=a,value=b",
        ] {
            let done = carried(&format!("q {line}")).unwrap();
            assert!(done.words.join(" ").starts_with(line), "{line}: {done:?}");
        }
        let words = carried("q -vnc 0.0.0.0:1").unwrap().words.join(" ");
        assert!(words.ends_with("-incoming defer -monitor none"), "{words}");
        assert_eq!(carried(&format!("q {words}")).unwrap().words.join(" "), {
            let own = words.strip_suffix(" -monitor none").unwrap();
            format!("-vnc 0.0.0.0:1 -monitor none {}", &own["-vnc 0.0.0.0:1 ".len()..])
        });
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn paths_are_mapped_wherever_they_stand() {
        let dir = std::env::temp_dir().join(format!("godwit-carry-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("disk"), "").unwrap();
        let here = dir.display().to_string();
        let mapping = format!("/srv={here}").parse().unwrap();
        let words = |line: &str| {
            let named = (std::slice::from_ref(&mapping), &[][..]);
            let carried = carry(&source(line), named, Path::new("/run/m"));
            carried.map(|it| it.words[..2].join(" ")).map_err(|error| error.to_string())
        };
        for (line, expected) in [
            ("-drive file=/srv/disk,if=virtio", format!("-drive file={here}/disk,if=virtio")),
            ("-hda /srv/disk", format!("-hda {here}/disk")),
            ("/srv/disk", format!("-hda {here}/disk")),
            (
                "-blockdev driver=raw,file.driver=file,file.filename=/srv/disk",
                format!("-blockdev driver=raw,file.driver=file,file.filename={here}/disk"),
            ),
            (
                "-blockdev {\"driver\":\"file\",\"filename\":\"/srv/disk\"}",
                format!("-blockdev {{\"driver\":\"file\",\"filename\":\"{here}/disk\"}}"),
            ),
            (
                "-object memory-backend-file,id=m,mem-path=/srv/ram",
                format!("-object memory-backend-file,id=m,mem-path={here}/ram"),
            ),
            ("-qmp unix:/srv/q,server=on", format!("-qmp unix:{here}/q,server=on")),
            ("-object rng-random,filename=/dev/urandom", {
                "-object rng-random,filename=/dev/urandom".to_owned()
            }),
            ("-drive file=nbd://host/disk", "-drive file=nbd://host/disk".to_owned()),
        ] {
            assert_eq!(words(&format!("q {line}")).as_deref(), Ok(expected.as_str()), "{line}");
        }
        let file = format!("{here}/disk");
        let named = [file.parse().unwrap()];
        let settings = format!("q -readconfig {file}");
        let settings = carry(&source(&settings), (&named, &[]), Path::new("/run/m")).unwrap();
        assert_eq!(settings.words[..2], ["-readconfig".to_owned(), file]);
        // Where somebody listens, QEMU cannot.
        let listener = std::os::unix::net::UnixListener::bind(dir.join("taken")).unwrap();
        for line in
            ["-qmp unix:/srv/taken,server=on", "-chardev socket,id=a,path=/srv/taken,server=on"]
        {
            let told = words(&format!("q {line}")).unwrap_err();
            assert!(told.contains("somebody listens at"), "{told}");
        }
        drop(listener);
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let told = words(&format!("q -serial tcp:127.0.0.1:{port},server=on")).unwrap_err();
        assert!(told.contains("somebody listens at"), "{told}");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn secrets_are_not_shown_and_words_are_quoted() {
        let words = ["-object", "secret,id=s,data=hidden", "-append", "a b", "-x", "it's"];
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        let text = shown(Path::new("/usr/bin/q"), &words);
        assert_eq!(text, r"/usr/bin/q -object secret,id=s,data=... -append 'a b' -x 'it'\''s'");
        let json = r#"{"qom-type":"secret","id":"s","data":"hidden"}"#.to_owned();
        assert!(!shown(Path::new("q"), &[json]).contains("hidden"));
    }
}
