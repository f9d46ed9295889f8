//! The command line of a QEMU: its options, and what is in their values.
//!
//! A QEMU of any version is read here, by whoever started it; which options there are is for those
//! to say who carry them elsewhere.

/// An option as QEMU was given it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Given {
    /// Without the dashes, of which one is as good as two; empty for what stands alone, which is an
    /// image of a disk.
    pub(crate) name: String,
    /// What follows it.
    pub(crate) value: Option<String>,
}

/// The options of QEMU 7.2 to 11.1 that have no value (qemu-options.hx).
const ALONE: [&str; 34] = [
    "S",
    "async-teardown",
    "audio-help",
    "daemonize",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "jitdump",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nographic",
    "old-param",
    "only-migratable",
    "perfmap",
    "portrait",
    "preconfig",
    "s",
    "semihosting",
    "singlestep",
    "snapshot",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
    "?",
];

/// The options of a command line, whose first word is the program. What follows an option is its
/// value, unless the option has none or another option follows.
pub(crate) fn options(words: &[String]) -> Vec<Given> {
    let mut found = Vec::new();
    let mut words = words.iter().skip(1).peekable();
    while let Some(word) = words.next() {
        let Some(name) = option_name(word) else {
            found.push(Given { name: String::new(), value: Some(word.clone()) });
            continue;
        };
        let takes = !ALONE.contains(&name);
        let value = words.next_if(|next| takes && option_name(next).is_none()).cloned();
        found.push(Given { name: name.to_owned(), value });
    }
    found
}

/// What an option is called (softmmu/vl.c, `lookup_opt`); a dash alone is a value.
fn option_name(word: &str) -> Option<&str> {
    let name = word.strip_prefix('-')?;
    let name = name.strip_prefix('-').unwrap_or(name);
    (!name.is_empty()).then_some(name)
}

/// The parts between commas, as QEMU takes them (util/qemu-option.c, `get_opt_name_value`): a name
/// ends at the first comma or `=`, and only in what is behind that, or stands first and alone, are
/// two commas one.
pub(crate) fn parts(value: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = Some(value);
    while let Some(left) = rest.filter(|left| !left.is_empty() || found.is_empty()) {
        let name = left.find([',', '=']).unwrap_or(left.len());
        let is_name = !found.is_empty() && !left[name..].starts_with('=');
        let (part, after) = match is_name {
            true => (left[..name].to_owned(), left.get(name + 1..)),
            false => text(left),
        };
        found.push(part);
        rest = after;
    }
    found
}

/// What stands before the first single comma, and what behind it.
fn text(value: &str) -> (String, Option<&str>) {
    let (mut text, mut rest) = (String::new(), value);
    while let Some((before, after)) = rest.split_once(',') {
        text.push_str(before);
        match after.strip_prefix(',') {
            Some(after) => {
                text.push(',');
                rest = after;
            }
            None => return (text, Some(after)),
        }
    }
    text.push_str(rest);
    (text, None)
}

/// The value of `key` among the parts of an option.
pub(crate) fn key(parts: &[String], key: &str) -> Option<String> {
    parts.iter().find_map(|part| part.strip_prefix(key)?.strip_prefix('=').map(str::to_owned))
}

/// The value of `key` in an option that is written with commas or as JSON; what stands first and
/// alone is that of `implied`.
pub(crate) fn find(value: &str, name: &str, implied: &str) -> Option<String> {
    if value.starts_with('{') {
        let json: serde_json::Value = serde_json::from_str(value).ok()?;
        let found = json.get(name)?;
        return Some(found.as_str().map_or_else(|| found.to_string(), str::to_owned));
    }
    let parts = parts(value);
    let first = parts.first().filter(|part| name == implied && !part.contains('='));
    key(&parts, name).or_else(|| first.cloned())
}

/// The options that a file of settings stands for (docs/config; what -readconfig reads): a section
/// each, in which chardevs, devices and others have their kind under a key.
pub(crate) fn settings(text: &str) -> Vec<Given> {
    let mut found: Vec<Given> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            let (name, id) = section.split_once(' ').unwrap_or((section, ""));
            let name = if name == "memory" { "m" } else { name };
            let id = id.trim().trim_matches('"');
            let value = if id.is_empty() { String::new() } else { format!("id={id}") };
            found.push(Given { name: name.to_owned(), value: Some(value) });
        } else if let (Some((key, text)), Some(Given { value: Some(value), .. })) =
            (line.split_once('=').filter(|_| !line.starts_with('#')), found.last_mut())
        {
            let (key, text) = (key.trim(), text.trim().trim_matches('"').replace(',', ",,"));
            *value = match (key, value.is_empty()) {
                // Where the command line has it: in front, without the key.
                ("backend", false) => format!("{text},{value}"),
                ("backend", true) => text,
                (_, true) => format!("{key}={text}"),
                (_, false) => format!("{value},{key}={text}"),
            };
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn options_have_the_values_that_follow_them() {
        let given = |name: &str, value: Option<&str>| Given {
            name: name.to_owned(),
            value: value.map(str::to_owned),
        };
        let line = "qemu --enable-kvm -m 1G -S disk.img -serial stdio -daemonize -append -";
        assert_eq!(
            options(&words(line)),
            [
                given("enable-kvm", None),
                given("m", Some("1G")),
                given("S", None),
                given("", Some("disk.img")),
                given("serial", Some("stdio")),
                given("daemonize", None),
                given("append", Some("-")),
            ]
        );
    }

    #[test]
    fn values_are_found_with_commas_and_in_json() {
        assert_eq!(find("socket,id=a,path=/x,,y", "path", ""), Some("/x,y".to_owned()));
        assert_eq!(find("virtio-rng-pci,id=a", "driver", "driver"), Some("virtio-rng-pci".into()));
        assert_eq!(find("id=a,driver=x", "driver", "driver"), Some("x".to_owned()));
        let json = r#"{"driver":"virtio-blk-pci","id":"disk","bootindex":1}"#;
        assert_eq!(find(json, "driver", "driver"), Some("virtio-blk-pci".to_owned()));
        assert_eq!(find(json, "bootindex", ""), Some("1".to_owned()));
        assert_eq!(find(json, "path", ""), None);
        assert_eq!(find("{", "path", "path"), None);
    }

    #[test]
    fn a_file_of_settings_stands_for_options() {
        // As Incus writes it.
        let text = "# Machine\n[machine]\ntype = \"q35\"\n\n[memory]\nsize = \"1024M\"\n\n\
                    [chardev \"monitor\"]\nbackend = \"socket\"\n\
                    path = \"/run/incus/v1/qemu.monitor\"\nserver = \"on\"\n\
                    [mon]\nchardev = \"monitor\"\nmode = \"control\"\n";
        let given = |name: &str, value: &str| Given {
            name: name.to_owned(),
            value: Some(value.to_owned()),
        };
        assert_eq!(
            settings(text),
            [
                given("machine", "type=q35"),
                given("m", "size=1024M"),
                given("chardev", "socket,id=monitor,path=/run/incus/v1/qemu.monitor,server=on"),
                given("mon", "chardev=monitor,mode=control"),
            ]
        );
        assert_eq!(settings("path = /x\n]["), []);
    }
}
