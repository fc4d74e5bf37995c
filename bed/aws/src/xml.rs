//! Minimal XML reading and writing for the front end.

use roxmltree::{Document, Node};

pub const PROLOG: &str = r#"<?xml version="1.0" encoding="UTF-8"?>"#;

/// `<name>text</name>` with the text escaped.
pub fn element(name: &str, text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<{name}>{text}</{name}>")
}

/// An answer of EC2 with these elements.
pub fn answer(action: &str, content: &str) -> String {
    format!(
        "{PROLOG}<{action}Response xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"><requestId>bed</requestId>{content}</{action}Response>"
    )
}

pub fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name_local(name))
}

/// The text at a path of child elements; `None` if an element is missing or empty.
pub fn text<'a>(node: Node<'a, '_>, path: &[&str]) -> Option<&'a str> {
    path.iter().try_fold(node, |node, name| child(node, name))?.text()
}

pub fn items<'a, 'i>(node: Node<'a, 'i>, list: &str) -> Vec<Node<'a, 'i>> {
    child(node, list).map(|list| list.children().filter(Node::is_element).collect()).unwrap_or_default()
}

/// The first element of that name anywhere in the document.
pub fn find<'a, 'i>(document: &'a Document<'i>, name: &str) -> Option<Node<'a, 'i>> {
    document.descendants().find(|node| node.has_tag_name_local(name))
}

/// The key-value pairs of a `tagSet`.
pub fn tags(node: Node<'_, '_>) -> Vec<(String, String)> {
    let pair = |item| Some((text(item, &["key"])?.to_owned(), text(item, &["value"]).unwrap_or_default().to_owned()));
    items(node, "tagSet").into_iter().filter_map(pair).collect()
}

/// Compares names without the namespace of EC2's responses.
trait LocalName {
    fn has_tag_name_local(&self, name: &str) -> bool;
}

impl LocalName for Node<'_, '_> {
    fn has_tag_name_local(&self, name: &str) -> bool {
        self.is_element() && self.tag_name().name() == name
    }
}
