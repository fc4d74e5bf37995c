//! Derives the board's name, a label value, from the device tree.

/// The maximum length of a Kubernetes label value.
const LABEL_VALUE_MAX: usize = 63;

/// The board's name from two properties of the root node. `compatible` is a list of NUL-terminated names, the most
/// specific first; `model` is a human-readable name.
pub fn from_device_tree(compatible: &[u8], model: &[u8]) -> Option<String> {
    let names = compatible.split(|byte| *byte == 0).chain(model.split(|byte| *byte == 0));
    names.map(label_value).find(|value| !value.is_empty())
}

/// The text in lower case, with each run of invalid characters replaced by a dash. May be empty.
fn label_value(text: &[u8]) -> String {
    let mut value = String::new();
    for byte in text {
        match byte {
            byte if byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_') => {
                value.push(char::from(byte.to_ascii_lowercase()));
            }
            _ if value.ends_with('-') => {}
            _ => value.push('-'),
        }
    }
    let value = value.trim_start_matches(['.', '_', '-']);
    value[..value.len().min(LABEL_VALUE_MAX)].trim_end_matches(['.', '_', '-']).to_owned()
}

pub fn is_label_value(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let outer = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    text.len() <= LABEL_VALUE_MAX && text.bytes().all(inner) && outer(text.bytes().next()) && outer(text.bytes().last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boards_as_their_device_trees_name_them() {
        for (compatible, model, board) in [
            (&b"milkv,pioneer\0sophgo,sg2042\0"[..], &b"Milk-V Pioneer\0"[..], "milkv-pioneer"),
            (
                b"starfive,visionfive-2-v1.3b\0starfive,jh7110\0",
                b"StarFive VisionFive 2 v1.3B\0",
                "starfive-visionfive-2-v1.3b",
            ),
            (b"sifive,hifive-unmatched-a00\0sifive,fu740-c000\0", b"", "sifive-hifive-unmatched-a00"),
            (b"", b"Scaleway EM-RV1-C4M16S128-A\0", "scaleway-em-rv1-c4m16s128-a"),
            (b"riscv-virtio\0", b"riscv-virtio,qemu\0", "riscv-virtio"),
            (b"\0,\0", b"BananaPi  BPI-F3 (16 GB)\0", "bananapi-bpi-f3-16-gb"),
            (b"--a,,b..\0", b"", "a-b"),
            (b"thead,light-lpi4a", b"", "thead-light-lpi4a"),
            (b"caf\xc3\xa9,\xff\0", b"", "caf"),
        ] {
            assert_eq!(from_device_tree(compatible, model).as_deref(), Some(board));
        }
        for nothing in [&b""[..], b"\0", b",,\0", b"\xff\0"] {
            assert_eq!(from_device_tree(nothing, nothing), None);
        }
    }

    #[test]
    fn whatever_a_tree_says_the_label_is_valid() {
        let long = format!("vendor,{}", "x-".repeat(60));
        for text in [&long[..], "a,b", "Ünïcödé board", "x", &"-".repeat(100), &format!("a{}b", "-".repeat(100))] {
            if let Some(value) = from_device_tree(text.as_bytes(), b"") {
                assert!(is_label_value(&value), "{text}: {value}");
            }
        }
    }
}
