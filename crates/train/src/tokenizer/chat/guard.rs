//! Adds hooks to a template's program at every place where values can grow, or where the work is unlimited.
//!
//! The engine counts instructions, but not the cost of an instruction. Forty instructions `x ~ x` give a text of a terabyte, and one `in`
//! may search a list of a billion items. Operators and lists have no hooks in the engine, and constant expressions are evaluated at compile
//! time. So this module rebuilds the parsed template with filters around operands and results. The names of these filters begin with `#`,
//! which no template can write; `bounds` implements the filters. Filters, tests, functions and methods of templates are guarded where they
//! are registered.

use minijinja::machinery::ast::{self, BinOpKind, CallArg, Expr, Spanned, Stmt, UnaryOpKind};
use minijinja::machinery::{Span, Token, WhitespaceConfig, tokenize};
use minijinja::{Error, ErrorKind, Value};

/// Charges for reading a whole value.
pub(super) const READ: &str = "#read";
/// Charges for reading a whole value and for writing it as text.
pub(super) const WRITTEN: &str = "#written";
/// Charges for a new value, and evaluates its lazy items.
pub(super) const MADE: &str = "#made";
/// Charges for the result of an addition, and evaluates its lazy items.
pub(super) const SUM: &str = "#sum";
/// Charges for a list or an object with all its contents, and limits its nesting depth.
pub(super) const BUILT: &str = "#built";
/// Refuses values that a namespace must not contain.
pub(super) const KEPT: &str = "#kept";
/// Charges for access to one item.
pub(super) const INDEXED: &str = "#indexed";
/// Charges for a macro.
pub(super) const DEFINED: &str = "#defined";

/// White-space control of blocks, as in `transformers`.
pub(super) const WHITESPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };

/// Largest size of a template in bytes. Published templates have some ten thousand bytes.
const MOST_SOURCE: usize = 1 << 20;

/// Largest number of operators, names and brackets in a tag. Each may nest one level deeper. Published templates have a hundred of these in
/// a tag.
const MOST_NESTING: usize = 2000;

/// Size in bytes up to which the copy of a text is not charged.
const SMALL: usize = 64;

/// Checks that the template can be parsed on a thread of [`super::engine`]. The stack limits the size of a template, because the parser,
/// the compiler and the destructors recurse once per link of a chain.
///
/// # Errors
/// The error names the limit that the template exceeds.
pub(super) fn check_source(text: &str) -> Result<(), Error> {
    let fail = |why: String| Error::new(ErrorKind::SyntaxError, why);
    if text.len() > MOST_SOURCE {
        return Err(fail(format!("has {} bytes, more than {MOST_SOURCE}", text.len())));
    }
    let (mut nesting, mut branches) = (0, 0);
    for token in tokenize(text, false, minijinja::syntax::SyntaxConfig, WHITESPACE) {
        // The parser reports invalid tokens later, with their line.
        let Ok((token, span)) = token else { return Ok(()) };
        match token {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => nesting = 0,
            Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) => {}
            Token::Comma | Token::Colon | Token::BracketClose | Token::ParenClose | Token::BraceClose => {}
            Token::Ident("elif") => branches += 1,
            _ => nesting += 1,
        }
        if nesting > MOST_NESTING || branches > MOST_NESTING {
            let what = if nesting > branches { "operators and names in one tag" } else { "`elif`" };
            return Err(fail(format!("line {} has more than {MOST_NESTING} {what}", span.start_line)));
        }
    }
    Ok(())
}

fn again<T, U>(of: &Spanned<T>, node: U) -> Spanned<U> {
    Spanned::new(node, of.span())
}

/// Wraps an expression in a filter.
fn hook<'a>(name: &'static str, of: Expr<'a>) -> Expr<'a> {
    let span = of.span();
    Expr::Filter(Spanned::new(ast::Filter { name, expr: Some(of), args: Vec::new() }, span))
}

/// A statement that writes an empty text, which the formatter counts as a step.
fn tick<'a>(span: Span) -> Stmt<'a> {
    Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: constant("", span) }, span))
}

fn constant<'a>(text: &str, span: Span) -> Expr<'a> {
    Expr::Const(Spanned::new(ast::Const { value: Value::from(text) }, span))
}

/// Whether this is a constant that costs nothing to read: a number, a short text, or a short list of such constants.
fn is_small(of: &Expr<'_>) -> bool {
    match of {
        Expr::Const(of) => of.value.as_str().is_none_or(|text| text.len() <= SMALL),
        Expr::List(of) => of.items.len() <= SMALL && of.items.iter().all(is_small),
        _ => false,
    }
}

/// Whether the compiler may evaluate the expression. A hook around such an expression prevents the evaluation.
fn may_be_constant(of: &Expr<'_>) -> bool {
    use Expr::{BinOp, Compare, Const, List, Map, UnaryOp};
    matches!(of, Const(_) | List(_) | Map(_) | UnaryOp(_) | BinOp(_) | Compare(_))
}

/// The expression with a hook that charges for reading, unless reading costs nothing.
fn read<'a>(of: &Expr<'a>) -> Expr<'a> {
    if is_small(of) { expr(of) } else { hook(READ, expr(of)) }
}

fn body<'a>(of: &[Stmt<'a>]) -> Vec<Stmt<'a>> {
    let mut out = Vec::with_capacity(of.len());
    for one in of {
        // A macro lives until the template ends, so each definition is charged.
        if let Stmt::Macro(of) = one {
            let expr = hook(DEFINED, constant("", of.span()));
            out.push(Stmt::EmitExpr(again(of, ast::EmitExpr { expr })));
        }
        out.push(guarded(one));
    }
    out
}

/// Adds hooks to statements that may run more than once.
fn repeated<'a>(of: &[Stmt<'a>], span: Span) -> Vec<Stmt<'a>> {
    std::iter::once(tick(span)).chain(body(of)).collect()
}

/// Adds hooks to an assignment target: a name, several names, or an attribute of a namespace.
fn target<'a>(of: &Expr<'a>) -> Expr<'a> {
    match of {
        Expr::List(of) => Expr::List(again(of, ast::List { items: of.items.iter().map(target).collect() })),
        other => expr(other),
    }
}

fn all<'a>(of: &[Expr<'a>]) -> Vec<Expr<'a>> {
    of.iter().map(expr).collect()
}

/// The same template or statement with hooks.
pub(super) fn guarded<'a>(of: &Stmt<'a>) -> Stmt<'a> {
    match of {
        Stmt::Template(of) => Stmt::Template(again(of, ast::Template { children: body(&of.children) })),
        Stmt::EmitExpr(of) => Stmt::EmitExpr(again(of, ast::EmitExpr { expr: expr(&of.expr) })),
        Stmt::EmitRaw(of) => match of.raw.len() <= SMALL {
            true => Stmt::EmitRaw(again(of, ast::EmitRaw { raw: of.raw })),
            // The formatter counts text that is output as a value.
            false => Stmt::EmitExpr(again(of, ast::EmitExpr { expr: constant(of.raw, of.span()) })),
        },
        Stmt::ForLoop(of) => Stmt::ForLoop(again(
            of,
            ast::ForLoop {
                target: target(&of.target),
                iter: expr(&of.iter),
                filter_expr: of.filter_expr.as_ref().map(expr),
                recursive: of.recursive,
                body: repeated(&of.body, of.span()),
                else_body: body(&of.else_body),
            },
        )),
        Stmt::IfCond(of) => {
            let (true_body, false_body) = (body(&of.true_body), body(&of.false_body));
            Stmt::IfCond(again(of, ast::IfCond { expr: expr(&of.expr), true_body, false_body }))
        }
        Stmt::WithBlock(of) => {
            let assignments = of.assignments.iter().map(|(to, from)| (target(to), expr(from))).collect();
            Stmt::WithBlock(again(of, ast::WithBlock { assignments, body: body(&of.body) }))
        }
        Stmt::Set(of) => {
            let from = expr(&of.expr);
            // Only a namespace has assignable attributes.
            let from = if matches!(of.target, Expr::GetAttr(_)) { hook(KEPT, from) } else { from };
            Stmt::Set(again(of, ast::Set { target: target(&of.target), expr: from }))
        }
        Stmt::SetBlock(of) => {
            let (target, filter) = (target(&of.target), of.filter.as_ref().map(expr));
            Stmt::SetBlock(again(of, ast::SetBlock { target, filter, body: body(&of.body) }))
        }
        Stmt::AutoEscape(of) => {
            let enabled = expr(&of.enabled);
            Stmt::AutoEscape(again(of, ast::AutoEscape { enabled, body: body(&of.body) }))
        }
        Stmt::FilterBlock(of) => {
            let filter = expr(&of.filter);
            Stmt::FilterBlock(again(of, ast::FilterBlock { filter, body: body(&of.body) }))
        }
        Stmt::Block(of) => {
            let body = repeated(&of.body, of.span());
            Stmt::Block(again(of, ast::Block { name: of.name, required: of.required, body }))
        }
        Stmt::Import(of) => {
            Stmt::Import(again(of, ast::Import { expr: expr(&of.expr), name: expr(&of.name) }))
        }
        Stmt::FromImport(of) => {
            let names = of.names.iter().map(|(name, to)| (expr(name), to.as_ref().map(expr))).collect();
            Stmt::FromImport(again(of, ast::FromImport { expr: expr(&of.expr), names }))
        }
        Stmt::Extends(of) => Stmt::Extends(again(of, ast::Extends { name: expr(&of.name) })),
        Stmt::Include(of) => {
            let (name, ignore_missing) = (expr(&of.name), of.ignore_missing);
            Stmt::Include(again(of, ast::Include { name, ignore_missing }))
        }
        Stmt::Macro(of) => Stmt::Macro(macro_of(of)),
        Stmt::CallBlock(of) => {
            let (call, macro_decl) = (call(&of.call), macro_of(&of.macro_decl));
            Stmt::CallBlock(again(of, ast::CallBlock { call, macro_decl }))
        }
        Stmt::Continue(of) => Stmt::Continue(again(of, ast::Continue)),
        Stmt::Break(of) => Stmt::Break(again(of, ast::Break)),
        Stmt::Do(of) => Stmt::Do(again(of, ast::Do { call: call(&of.call) })),
    }
}

fn macro_of<'a>(of: &Spanned<ast::Macro<'a>>) -> Spanned<ast::Macro<'a>> {
    let (args, defaults) = (all(&of.args), all(&of.defaults));
    again(of, ast::Macro { name: of.name, args, defaults, body: repeated(&of.body, of.span()) })
}

fn expr<'a>(of: &Expr<'a>) -> Expr<'a> {
    match of {
        Expr::Var(of) => Expr::Var(again(of, ast::Var { id: of.id })),
        Expr::Const(of) => Expr::Const(again(of, ast::Const { value: of.value.clone() })),
        Expr::Slice(of) => {
            let [start, stop, step] = [&of.start, &of.stop, &of.step].map(|at| at.as_ref().map(expr));
            hook(MADE, Expr::Slice(again(of, ast::Slice { expr: expr(&of.expr), start, stop, step })))
        }
        Expr::UnaryOp(of) => {
            let is_not = matches!(of.op, UnaryOpKind::Not);
            let op = if is_not { UnaryOpKind::Not } else { UnaryOpKind::Neg };
            Expr::UnaryOp(again(of, ast::UnaryOp { op, expr: expr(&of.expr) }))
        }
        Expr::BinOp(of) => binary(of),
        Expr::Compare(of) => {
            let ops = of.ops.iter().map(|op| ast::CompareOp { op: op.op, expr: read(&op.expr) }).collect();
            // Constants get a hook too, because the compiler would otherwise evaluate the comparison.
            Expr::Compare(again(of, ast::Compare { expr: hook(READ, expr(&of.expr)), ops }))
        }
        Expr::IfExpr(of) => {
            let false_expr = of.false_expr.as_ref().map(expr);
            let (test_expr, true_expr) = (expr(&of.test_expr), expr(&of.true_expr));
            Expr::IfExpr(again(of, ast::IfExpr { test_expr, true_expr, false_expr }))
        }
        Expr::Filter(of) => {
            let (input, args) = (of.expr.as_ref().map(expr), args(&of.args));
            Expr::Filter(again(of, ast::Filter { name: of.name, expr: input, args }))
        }
        Expr::Test(of) => {
            Expr::Test(again(of, ast::Test { name: of.name, expr: expr(&of.expr), args: args(&of.args) }))
        }
        Expr::GetAttr(of) => Expr::GetAttr(again(of, ast::GetAttr { expr: expr(&of.expr), name: of.name })),
        Expr::GetItem(of) => {
            let is_key = matches!(&of.subscript_expr, Expr::Const(key) if key.value.as_str().is_some());
            let (from, subscript_expr) = (expr(&of.expr), read(&of.subscript_expr));
            let from = if is_key { from } else { hook(INDEXED, from) };
            Expr::GetItem(again(of, ast::GetItem { expr: from, subscript_expr }))
        }
        Expr::Call(of) => Expr::Call(call(of)),
        Expr::List(of) => {
            let list = Expr::List(again(of, ast::List { items: all(&of.items) }));
            if of.items.iter().all(is_small) { list } else { hook(BUILT, list) }
        }
        Expr::Map(of) => {
            let map = Expr::Map(again(of, ast::Map { keys: all(&of.keys), values: all(&of.values) }));
            if of.values.iter().all(is_small) { map } else { hook(BUILT, map) }
        }
    }
}

/// An operator with hooks. The hooks prevent the compiler from evaluating the operator.
fn binary<'a>(of: &Spanned<ast::BinOp<'a>>) -> Expr<'a> {
    let (small_left, small_right) = (is_small(&of.left), is_small(&of.right));
    let (mut left, mut right) = (expr(&of.left), expr(&of.right));
    match of.op {
        BinOpKind::Concat => {
            left = hook(WRITTEN, left);
            right = if small_right { right } else { hook(WRITTEN, right) };
        }
        BinOpKind::Add | BinOpKind::Mul => {
            left = if may_be_constant(&left) { hook(READ, left) } else { left };
        }
        BinOpKind::Eq | BinOpKind::Ne | BinOpKind::Lt | BinOpKind::Lte | BinOpKind::Gt | BinOpKind::Gte => {
            if !small_left && !small_right {
                (left, right) = (hook(READ, left), hook(READ, right));
            }
        }
        BinOpKind::In => {
            left = if small_left { left } else { hook(READ, left) };
            right = if small_right { right } else { hook(READ, right) };
        }
        BinOpKind::ScAnd
        | BinOpKind::ScOr
        | BinOpKind::Sub
        | BinOpKind::Div
        | BinOpKind::FloorDiv
        | BinOpKind::Rem
        | BinOpKind::Pow => {}
    }
    let done = Expr::BinOp(again(of, ast::BinOp { op: of.op, left, right }));
    match of.op {
        BinOpKind::Add => hook(SUM, done),
        BinOpKind::Mul => hook(MADE, done),
        _ => done,
    }
}

fn args<'a>(of: &[CallArg<'a>]) -> Vec<CallArg<'a>> {
    let one = |arg: &CallArg<'a>| match arg {
        CallArg::Pos(of) => CallArg::Pos(expr(of)),
        CallArg::Kwarg(name, of) => CallArg::Kwarg(name, expr(of)),
        CallArg::PosSplat(of) => CallArg::PosSplat(read(of)),
        CallArg::KwargSplat(of) => CallArg::KwargSplat(read(of)),
    };
    of.iter().map(one).collect()
}

fn call<'a>(of: &Spanned<ast::Call<'a>>) -> Spanned<ast::Call<'a>> {
    let mut args = args(&of.args);
    // The methods of `loop` compare their arguments.
    let is_of_loop = |of: &Expr<'_>| matches!(of, Expr::Var(of) if of.id == "loop");
    if matches!(&of.expr, Expr::GetAttr(method) if is_of_loop(&method.expr)) {
        let read_whole = |arg| match arg {
            CallArg::Pos(of) => CallArg::Pos(hook(READ, of)),
            other => other,
        };
        args = args.into_iter().map(read_whole).collect();
    }
    again(of, ast::Call { expr: expr(&of.expr), args })
}
