//! What the running kernel is.

/// Major and minor version of the running kernel; zeros if it does not say.
///
/// Distributions back-port features: use this only to choose what to try
/// first, never to refuse.
pub fn kernel_version() -> (u32, u32) {
    parse(&rustix::system::uname().release().to_string_lossy()).unwrap_or((0, 0))
}

fn parse(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_as_distributions_write_them() {
        assert_eq!(parse("6.18.44-fc-v657"), Some((6, 18)));
        assert_eq!(parse("6.12+deb13-amd64"), Some((6, 12)));
        assert_eq!(parse("7.0-rc1"), Some((7, 0)));
        assert_eq!(parse("custom"), None);
        assert!(kernel_version() > (3, 0));
    }
}
