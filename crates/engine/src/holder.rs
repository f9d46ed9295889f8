//! Which process holds an address that is wanted: so that an operator need not search for it.
//!
//! All of it is a courtesy: whatever cannot be read (another user's processes, above all) gives no
//! answer.

use std::fs;
use std::path::Path;

/// The process that listens at the TCP port `port` of this host, as people know it.
pub(crate) fn of_port(port: u16) -> Option<String> {
    let lines = |path| fs::read_to_string(path).unwrap_or_default();
    let tables = lines("/proc/net/tcp") + &lines("/proc/net/tcp6");
    // proc(5): the second field is the local address, the fourth the state (0A: LISTEN), the tenth
    // the inode.
    let inode = tables.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let local = fields.get(1)?.rsplit_once(':')?.1;
        let listens = *fields.get(3)? == "0A" && u16::from_str_radix(local, 16) == Ok(port);
        listens.then(|| fields.get(9).map(|inode| (*inode).to_owned()))?
    })?;
    of_socket(&inode)
}

/// The process that listens at the unix socket `path`.
pub(crate) fn of_path(path: &Path) -> Option<String> {
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    // proc(5): the fourth field has the flag of sockets that accept connections, the seventh is the
    // inode, then the path.
    let inode = table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let listens = *fields.get(3)? == "00010000" && Path::new(fields.get(7)?) == path;
        listens.then(|| fields.get(6).map(|inode| (*inode).to_owned()))?
    })?;
    of_socket(&inode)
}

/// The process that has the socket of that inode open.
fn of_socket(inode: &str) -> Option<String> {
    let target = format!("socket:[{inode}]");
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let holds = |pid: &u32| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        descriptors
            .flat_map(|entry| fs::read_link(entry.path()))
            .any(|link| link.as_os_str() == &*target)
    };
    let pid = pids.into_iter().find(holds)?;
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> =
        command.split(|byte| *byte == 0).take(2).map(String::from_utf8_lossy).collect();
    let program =
        words.first().and_then(|word| word.rsplit('/').next()).unwrap_or_default().to_owned();
    // Of a godwit the subcommand says more than its name.
    let sub = words.get(1).filter(|_| program == "godwit").map(|word| format!(" {word}"));
    Some(format!("process {pid} ({program}{})", sub.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_process_that_listens_is_found() {
        let own = format!("process {} (", std::process::id());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(of_port(port).unwrap().starts_with(&own));
        let path = std::env::temp_dir().join(format!("godwit-holder-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        assert!(of_path(&path).unwrap().starts_with(&own));
        drop(listener);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(of_path(&path), None);
    }
}
