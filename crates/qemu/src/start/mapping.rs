//! Which paths of the source's are which here. What the operator does not name is not opened.

use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

/// A directory or file of the source's, and where it is here: `/old=/new`, or `/same`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    from: PathBuf,
    to: PathBuf,
}

impl Mapping {
    /// Of one path to another; `None` where they are not absolute and without detours.
    pub(super) fn of(from: &Path, to: &Path) -> Option<Self> {
        Some(Self { from: plain(from)?, to: plain(to)? })
    }
}

/// Why a text is no mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write /OLD=/NEW, or /DIR for what has one path on both hosts: absolute, without '..'")]
pub struct MapError;

impl FromStr for Mapping {
    type Err = MapError;

    fn from_str(text: &str) -> Result<Self, MapError> {
        let (from, to) = text.split_once('=').unwrap_or((text, text));
        match (plain(Path::new(from)), plain(Path::new(to))) {
            (Some(from), Some(to)) => Ok(Self { from, to }),
            _ => Err(MapError),
        }
    }
}

/// An absolute path without detours.
fn plain(path: &Path) -> Option<PathBuf> {
    let fits = |part: &Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    (path.is_absolute() && path.components().all(|part| fits(&part)))
        .then(|| path.components().collect())
}

/// Where `path` of the source's, whose working directory was `directory`, is here, if the operator
/// has said so: by the mapping that names the most of it.
pub(super) fn place(path: &str, directory: &str, mappings: &[Mapping]) -> Option<PathBuf> {
    let whole = plain(&Path::new(directory).join(path))?;
    let fitting = mappings.iter().filter(|mapping| whole.starts_with(&mapping.from));
    let mapping = fitting.max_by_key(|mapping| mapping.from.components().count())?;
    let rest = whole.strip_prefix(&mapping.from).ok()?;
    // Joined to nothing a path gets a / at its end.
    Some(if rest.as_os_str().is_empty() { mapping.to.clone() } else { mapping.to.join(rest) })
}

/// Where the file `path` of the source's is here, if the operator has named that very file.
pub(super) fn exact_place(path: &str, mappings: &[Mapping]) -> Option<PathBuf> {
    mappings.iter().find(|it| it.from == Path::new(path)).map(|it| it.to.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_that_the_operator_named_and_no_others() {
        let mappings: Vec<Mapping> = ["/srv=/mnt/srv", "/srv/iso=/iso", "/same"]
            .iter()
            .map(|it| it.parse().unwrap())
            .collect();
        let at = |path: &str| place(path, "/srv/here", &mappings);
        let is = |path: &str| Some(PathBuf::from(path));
        assert_eq!(at("/srv/vm1.qcow2"), is("/mnt/srv/vm1.qcow2"));
        assert_eq!(at("/srv/iso/cd.iso"), is("/iso/cd.iso"));
        assert_eq!((at("/srv"), at("/same/x")), (is("/mnt/srv"), is("/same/x")));
        assert_eq!(at("disk.img"), is("/mnt/srv/here/disk.img"));
        for path in ["/srvx/a", "/etc/passwd", "/srv/../etc/passwd", "../../etc/passwd", "/"] {
            assert_eq!(at(path), None, "{path}");
        }
        for text in ["", "srv", "/srv=", "=/srv", "/srv=srv", "/a/../b", "/a=/b/.."] {
            assert_eq!(text.parse::<Mapping>(), Err(MapError), "{text}");
        }
    }
}
