//! Paths of entries: bytes, `/`-separated, always within the root.

/// One step of a symbolic link's target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Component {
    /// Back to the root.
    Root,
    /// To the parent, or nowhere from the root.
    Up,
    /// Down into a name.
    Name(Vec<u8>),
}

impl Component {
    /// The steps of a link's target.
    pub(crate) fn parse(target: &[u8]) -> Vec<Self> {
        let root = target.starts_with(b"/").then_some(Self::Root);
        let steps = target
            .split(|&byte| byte == b'/')
            .filter_map(|name| match name {
                b"" | b"." => None,
                b".." => Some(Self::Up),
                name => Some(Self::Name(name.to_vec())),
            });
        root.into_iter().chain(steps).collect()
    }
}

/// The names of an entry's path. As text: `a/../b` is `b`, and `..` at the root stays there, as
/// container runtimes take the names in archives.
pub(crate) fn components(path: &[u8]) -> Vec<&[u8]> {
    let mut names = Vec::new();
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => {
                names.pop();
            }
            name => names.push(name),
        }
    }
    names
}

/// True if `..` in the path would lead out of the root.
pub(crate) fn escapes(path: &[u8]) -> bool {
    let mut depth = 0usize;
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." if depth == 0 => return true,
            b".." => depth -= 1,
            _ => depth += 1,
        }
    }
    false
}

/// `dir` and a name in it.
pub(crate) fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() {
        return name.to_vec();
    }
    let mut path = Vec::with_capacity(dir.len() + 1 + name.len());
    path.extend_from_slice(dir);
    path.push(b'/');
    path.extend_from_slice(name);
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_within_the_root() {
        let names = |path: &str| components(path.as_bytes()).join(&b'/');
        assert_eq!(names("./a//b/./c/"), b"a/b/c");
        assert_eq!(names("/abs"), b"abs");
        assert_eq!(names("../../etc/passwd"), b"etc/passwd");
        assert_eq!(names("a/b/../../../c"), b"c");
        assert_eq!(names("./"), b"");
        assert_eq!(names("..a/...b"), b"..a/...b");
        assert!(escapes(b"a/../../b"));
        assert!(escapes(b"/.."));
        assert!(!escapes(b"a/../b"));
    }
}
