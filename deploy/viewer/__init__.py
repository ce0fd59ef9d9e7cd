"""`treadwheel view`: a run in the browser, down to the token. Reads run directories, live or done, and changes nothing.

No database, no build step, no network: pages are Jinja2 templates, `static/` holds ES modules and one style sheet, and curves are SVG
that `static/curves.js` draws. A policy without inline scripts and styles holds for all of it.

A page is one file in `pages/`, found by its being there:

    def rewards(run: Run, request: Request) -> dict[str, Any]:      # reads the run, returns what JSON takes; tested without a server
        ...

    ROUTES = page("/run/{run}/rewards", rewards, template="rewards.html")

`page` makes two routes: the page, whose template gets the returned dict as `data`, and its JSON under the same path with `.json`.
The template extends `layout.html` (blocks `title`, `main`, `scripts`) and has

    root    prefix of every link: {{ root }}/run/{{ run.name }}/rewards
    run     the run; None on the list of runs
    data    what the function returned
    here    name of the page's module, which marks the entry of the navigation

`raise HTTPException(404, "step 12 was never recorded")` (starlette's) shows that sentence. Scripts are modules from `static/`:
`<script type="module" src="{{ root }}/static/weights.js"></script>`; they take the page's data and the run's address from `page.js`, and
put text into the page by `textContent`. A script sets colours by `element.style`; `style="..."` in HTML is refused by the policy, so a
template uses classes. The colours of scales are variables at the top of `style.css`: `--sequential-0` to `-8`, `--diverging-0` to `-8`.
"""
