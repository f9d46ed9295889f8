//! Which disks move along, as an operator says it.

use std::fmt;
use std::str::FromStr;

/// Which disks of a VM move along with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DiskChoice {
    /// None: both sides use the same storage.
    #[default]
    None,
    /// All that the guest can write to.
    All,
    /// Those with these names; never empty, none twice.
    Named(Vec<String>),
}

/// Why a text names no disks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChoiceError {
    /// Nothing between two commas, or nothing at all.
    #[error(
        "'{0}' has an empty name in it: write 'all', 'none' or names with commas between, for \
         example disk0,disk1"
    )]
    Empty(String),
    /// A name twice.
    #[error("the disk '{0}' is named twice")]
    Twice(String),
    /// `all` or `none` beside other names.
    #[error("'{0}' stands for itself: write it alone, or name the disks")]
    Mixed(String),
}

/// The source wants to fill a disk that the operator of the destination did not name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the source wants to overwrite disk '{0}' of this VM, which was not allowed: start godwit \
     receive with --disks {0} or --disks all"
)]
pub struct NotAllowed(pub String);

impl DiskChoice {
    /// Whether no disk moves.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// At the destination: whether the disk that goes by all of `names`, and that the source calls
    /// `offered`, may be filled.
    ///
    /// # Errors
    /// When it was not named.
    pub fn allow(&self, offered: &str, names: &[String]) -> Result<(), NotAllowed> {
        let allowed = match self {
            Self::None => false,
            Self::All => true,
            Self::Named(allowed) => {
                allowed.iter().any(|name| name == offered || names.contains(name))
            }
        };
        if allowed { Ok(()) } else { Err(NotAllowed(offered.to_owned())) }
    }
}

impl fmt::Display for DiskChoice {
    /// As it is typed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.pad("none"),
            Self::All => f.pad("all"),
            Self::Named(names) => f.pad(&names.join(",")),
        }
    }
}

impl FromStr for DiskChoice {
    type Err = ChoiceError;

    /// Parses `all`, `none`, and names with commas between.
    fn from_str(text: &str) -> Result<Self, ChoiceError> {
        let mut names: Vec<String> = Vec::new();
        for name in text.split(',').map(str::trim) {
            if name.is_empty() {
                return Err(ChoiceError::Empty(text.to_owned()));
            }
            if names.iter().any(|other| other == name) {
                return Err(ChoiceError::Twice(name.to_owned()));
            }
            names.push(name.to_owned());
        }
        match names.iter().find(|name| matches!(name.as_str(), "all" | "none")) {
            Some(word) if names.len() > 1 => Err(ChoiceError::Mixed(word.clone())),
            Some(word) if word == "all" => Ok(Self::All),
            Some(_) => Ok(Self::None),
            None => Ok(Self::Named(names)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_all_none_or_names() {
        assert_eq!("all".parse(), Ok(DiskChoice::All));
        assert_eq!("none".parse(), Ok(DiskChoice::None));
        assert_eq!("a".parse(), Ok(DiskChoice::Named(vec!["a".to_owned()])));
        assert_eq!("a, b".parse(), Ok(DiskChoice::Named(vec!["a".to_owned(), "b".to_owned()])));
        for text in ["all", "none", "a", "a,b"] {
            assert_eq!(text.parse::<DiskChoice>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn only_what_was_named_may_be_filled() {
        let names = ["n1".to_owned(), "vd1".to_owned()];
        let allowed =
            |choice: &str| choice.parse::<DiskChoice>().unwrap().allow("n1", &names).is_ok();
        assert_eq!(
            ["all", "n1", "x,vd1", "none", "x"].map(allowed),
            [true, true, true, false, false]
        );
        let refused = DiskChoice::None.allow("n1", &names).unwrap_err().to_string();
        assert!(refused.contains("--disks n1 or --disks all"), "{refused}");
    }

    #[test]
    fn what_could_be_a_slip_is_refused() {
        let refused = |text: &str| text.parse::<DiskChoice>().unwrap_err();
        assert_eq!(refused("a,"), ChoiceError::Empty("a,".to_owned()));
        assert_eq!(refused(""), ChoiceError::Empty(String::new()));
        assert_eq!(refused("a,b,a"), ChoiceError::Twice("a".to_owned()));
        assert_eq!(refused("a,all"), ChoiceError::Mixed("all".to_owned()));
    }
}
